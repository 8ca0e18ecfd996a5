"""Runs the `parallel3d` command as `python -m parallel3d …`."""

import gc
import os
import sys


def main() -> int:
    if sys.argv[1:3] == ["slurm", "guard"]:  # a process of every host: without all the others need
        from parallel3d.slurm.guard import main as guard

        return guard(sys.argv[3:])
    try:
        gc.disable()  # imports create no garbage, and collections would take a tenth of their time
        from parallel3d.cli.command_line import main as command

        gc.freeze()
        gc.enable()
        return command()
    except KeyboardInterrupt:  # during the imports; later, the command handles interrupts
        print("parallel3d: interrupted", file=sys.stderr, flush=True)
        # A `return` would not be enough: if the interrupt came while C code of an import ran Python
        # code, the signal would still end the interpreter.
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
