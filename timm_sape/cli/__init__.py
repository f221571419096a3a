"""The command line: `timm-sape`, and `python -m timm_sape`.

One file per subcommand, with a function `add` that declares it and names its handler. Importing these files must stay
quick, so that `--help` is: handlers import torch, timm and the rest of the package themselves.
"""
import argparse
import io
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import List, Optional

from . import adapt, bench, compare, configs, data, experiment, probe, pshap, run, shifts, sweep
from . import list as list_
from . import map as map_
from .common import CommandError, add_import_option, import_modules

__all__ = ['main', 'make_parser']

COMMANDS = (run, configs, experiment, list_, bench, map_, pshap, probe, sweep, adapt, shifts, compare, data)


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name. Default: those of the process.

    Returns:
        The exit code: 0; 1 if a theorem of `probe` failed or a run of `experiment` is not finished; 2 if the user made
        a mistake; 130 after Ctrl-C; 141 if what reads the output has stopped reading.
    """
    args = make_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # not in a notebook
        sys.stdout.reconfigure(errors='backslashreplace')  # tables have a +- that not every locale has
    usual = warnings.formatwarning

    def formatted(message, category, filename, *rest) -> str:
        is_ours = Path(filename).is_relative_to(Path(__file__).parents[1])
        return f'timm-sape: {message}\n' if is_ours else usual(message, category, filename, *rest)

    warnings.formatwarning = formatted
    try:
        import_modules(args)
        code = args.handler(args)
        sys.stdout.flush()
        return code
    except CommandError as e:
        print(f'timm-sape: {e}', file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141  # as a process has that SIGPIPE ends
    finally:
        warnings.formatwarning = usual


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all subcommands."""
    parser = argparse.ArgumentParser(
        prog='timm-sape',
        description='Vision Transformers with a choice of position encodings, for timm.',
        epilog='`timm-sape COMMAND --help` tells more, with examples. `python -m timm_sape` is the same program.',
    )
    parser.add_argument('--version', action=_Version, nargs=0, help='show the versions of timm-sape, timm and torch')
    add_import_option(parser, 'imports')
    commands = parser.add_subparsers(metavar='COMMAND', required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """argparse's own action would need the versions even if nobody asks for them."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        from .. import __version__

        print(f'timm-sape {__version__}, timm {version("timm")}, torch {version("torch")}')
        parser.exit()
