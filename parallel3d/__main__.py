"""`python -m parallel3d …` is the `parallel3d` command; the launcher starts its ranks here too."""

import sys


def main() -> int:
    """Run a command line, or one local rank, which needs no command line's modules."""
    if sys.argv[1:2] == ["_worker"]:
        from parallel3d.run.worker import local_worker_main

        return local_worker_main(*sys.argv[2:])
    try:
        from parallel3d.cli.command_line import main as command

        return command()
    except KeyboardInterrupt:  # during the imports; later the command itself says so
        print("parallel3d: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
