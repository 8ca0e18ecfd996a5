"""Runs the `parallel3d` command as `python -m parallel3d …`."""

import gc
import os
import sys


def main() -> int:
    try:
        gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
        from parallel3d.cli.command_line import main as command

        gc.freeze()
        gc.enable()
        return command()
    except KeyboardInterrupt:  # during the imports; later the command prints it itself
        print("parallel3d: interrupted", file=sys.stderr, flush=True)
        # Not `return`: if the interrupt came while C code of an import ran Python, the interpreter
        # would still end by the signal.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
