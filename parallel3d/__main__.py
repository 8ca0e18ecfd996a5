"""`python -m parallel3d …` is the `parallel3d` command."""

import gc
import os
import sys


def main() -> int:
    """Run a command line."""
    try:
        gc.disable()  # nothing that is imported is ever garbage: looking for it takes a tenth
        from parallel3d.cli.command_line import main as command

        gc.freeze()
        gc.enable()
        return command()
    except KeyboardInterrupt:  # during the imports; later the command itself says so
        print("parallel3d: interrupted", file=sys.stderr, flush=True)
        # Not by `return`: where C code that a module imports ran Python when the interrupt came,
        # the interpreter has noted it, and would end by the signal after all.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
