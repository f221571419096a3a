"""What all subcommands share."""
import argparse
import importlib
import os
import sys
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Callable, Sequence

__all__ = [
    'CommandError',
    'add_command',
    'add_import_option',
    'import_modules',
    'refuse_options',
    'where_raised',
    'where_scripts_are',
]


class CommandError(Exception):
    """A mistake of the user, shown without a traceback; the exit code is 2."""


def add_command(
        commands,
        name: str,
        handler: Callable[[argparse.Namespace], int],
        summary: str,
        examples: str,
) -> argparse.ArgumentParser:
    """A subcommand with its help.

    Args:
        commands: What `add_subparsers` returned.
        name: What users type.
        handler: Called with the parsed arguments, returns the exit code.
        summary: One line.
        examples: Printed unchanged at the end of the help.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler, command=name)
    parser.register('action', None, _StoreOnce)  # of options that name no action
    # Shells do not expand --output=~/FILE. Path.expanduser would fail for a file called ~FILE.
    parser.register('type', Path, lambda text: Path(os.path.expanduser(text)))
    # A `dest` of its own: argparse would drop what was given before COMMAND. Experiments refuse it.
    add_import_option(parser, 'imports_of_command', shown=name != 'experiment')
    return parser


class _StoreOnce(argparse.Action):
    """What argparse does by default, but a list that is given twice is an error: argparse would keep the last."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if self.option_strings and isinstance(values, list) and getattr(namespace, self.dest) is not self.default:
            raise argparse.ArgumentError(self, 'given twice; give it once, with all values')
        setattr(namespace, self.dest, values)


def add_import_option(parser: argparse.ArgumentParser, dest: str, shown: bool = True) -> None:
    """Add `--import`, which works before the subcommand and after it."""
    parser.add_argument(
        '--import', dest=dest, action='append', default=[], metavar='MODULE',
        help='import this module first, a name or a .py file, e.g. with encodings of your own; may be repeated'
        if shown else argparse.SUPPRESS)


def import_modules(args: argparse.Namespace) -> None:
    """Import the modules that `--import` names, after this package.

    Raises:
        CommandError: If one cannot be imported, or the subcommand would not see it.
    """
    names = args.imports + args.imports_of_command
    if names and args.command == 'experiment':
        raise CommandError(
            'experiment starts train.py in new processes, which --import does not reach; write `args: {device_modules: '
            f'[timm_sape, {Path(names[0]).stem}]}}` in the plan, and add the folder of the module to PYTHONPATH')
    for name in names:
        _import(name)


def _import(name: str) -> None:
    is_file = name.endswith('.py')
    module = Path(name).stem if is_file else name
    if is_file and not os.path.isfile(name):
        raise CommandError(f'--import {name}: there is no such file')
    # Last, so that nothing there hides an installed module.
    folder = os.path.abspath(os.path.dirname(name) if is_file else '')
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = getattr(importlib.import_module(module), '__file__', None)  # built-in modules have none
    except Exception as e:  # whatever the user's code raises
        if isinstance(e, ModuleNotFoundError) and e.name == module:
            raise CommandError(
                f'--import {name}: there is no such module in {folder} or among the installed ones; give the path of '
                'its file, FOLDER/NAME.py') from e
        where = where_raised(e, lambda file: Path(file).stem == module)
        raise CommandError(f'--import {name}: {where}{type(e).__name__}: {" ".join(str(e).split())}') from e
    if is_file and not (found and os.path.samefile(found, name)):
        raise CommandError(f'--import {name}: {module} is the name of another module too, {found}; rename the file')


def refuse_options(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options that would be ignored.

    Args:
        args: The parsed arguments. An option that was not given is None.
        names: Of the options, as attributes of `args`.
        why: In words that follow the names of the options, such as 'not for this'.

    Raises:
        CommandError: If one was given.
    """
    given = [f'--{name.replace("_", "-")}' for name in names if getattr(args, name) is not None]
    if given:
        be, them = ('is', 'it') if len(given) == 1 else ('are', 'them')
        raise CommandError(f'{", ".join(given)} {be} {why}; leave {them} out')


def where_raised(e: Exception, is_users: Callable[[str], bool]) -> str:
    """`FILE, line N, ` of the innermost frame of an error in a file of the user's; empty if there is none."""
    frames = [frame for frame in traceback.extract_tb(e.__traceback__) if is_users(frame.filename)]
    return f'{frames[-1].filename}, line {frames[-1].lineno}, ' if frames else ''


def where_scripts_are() -> str:
    """How to get timm's scripts, in words that follow 'there is no ...'."""
    return (
        "timm's wheel has none of its scripts; get those of the installed version: git clone --depth 1 --branch "
        f'v{version("timm")} https://github.com/huggingface/pytorch-image-models')
