"""What subcommands share."""
import argparse
from importlib.metadata import version
from typing import Callable

__all__ = ['CommandError', 'add_command', 'where_scripts_are']


class CommandError(Exception):
    """A mistake that the user can mend: shown without a traceback, exit code 2."""


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
        examples: Shown as it is at the end of the help.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def where_scripts_are() -> str:
    """How to get timm's scripts, in words that follow 'there is no ...'."""
    return (
        "timm's wheel has none of timm's scripts, so get those of the installed version: git clone --depth 1 --branch "
        f'v{version("timm")} https://github.com/huggingface/pytorch-image-models')
