"""The command line: `timm-sape`, and `python -m timm_sape`.

One file per subcommand, with a function `add` that declares it and names its handler. What takes long to import is
imported in the handlers.
"""
import argparse
import sys
from typing import List, Optional

from . import bench, compare, configs, data, experiment, probe, pshap, run, shifts, sweep
from . import list as list_
from . import map as map_
from .common import CommandError

__all__ = ['main']

COMMANDS = (run, configs, experiment, list_, bench, map_, pshap, probe, sweep, shifts, compare, data)


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name, those of the process by default.

    Returns:
        The exit code: 0, or 2 if something is wrong with what was asked for.
    """
    parser = argparse.ArgumentParser(
        prog='timm-sape',
        description='Vision Transformers with a choice of position encodings, for timm.',
        epilog='`timm-sape COMMAND --help` tells more, with examples. `python -m timm_sape` is the same program.',
    )
    commands = parser.add_subparsers(metavar='COMMAND', required=True)
    for command in COMMANDS:
        command.add(commands)

    args = parser.parse_args(argv)
    try:
        return args.handler(args)
    except CommandError as e:
        print(f'timm-sape: {e}', file=sys.stderr)
        return 2
