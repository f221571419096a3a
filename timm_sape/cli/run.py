"""`timm-sape run`: run timm's scripts with our models registered."""
import argparse
import os
import runpy
import sys

from .common import CommandError, add_command, where_scripts_are

__all__ = ['add']


def add(commands) -> None:
    parser = add_command(
        commands, 'run', _run,
        summary="Run one of timm's scripts, or any other, with this package's models registered.",
        examples="""\
examples:
  timm-sape run validate.py --model vit_small_sape2_k --checkpoint model_best.pth.tar --data-dir ROOT
  timm-sape run train.py --config train_configs/smoke/test_vit_sape2_k.yaml --data-dir ROOT
  torchrun --nproc-per-node 2 -m timm_sape run train.py --config FILE --data-dir ROOT
  timm-sape run --import my_encoding.py train.py --model vit_small_ape --model-kwargs pos_enc=ape+my_encoding ...
  timm-sape run benchmark.py --help      (the help of benchmark.py)""",
    )
    parser.add_argument('script', metavar='SCRIPT', help='path of a Python script; our options come before it')
    parser.add_argument('script_args', metavar='...', nargs=argparse.REMAINDER, help="the script's own arguments")


def _run(args: argparse.Namespace) -> int:
    script = args.script
    if os.path.isdir(script):
        example = os.path.join(script, 'train.py')
        raise CommandError(f"'{script}' is a directory; name a script in it, such as {example}")
    if not os.path.exists(script):
        raise CommandError(f"there is no script '{script}'; {where_scripts_are()}")

    import timm_sape  # noqa: F401, registers the models

    # argv and path as `python SCRIPT ...` has them. In safe-path mode Python has not put our own folder first.
    sys.argv[:] = [script, *args.script_args]
    if not getattr(sys.flags, 'safe_path', False):  # Python 3.10 has no such mode
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    runpy.run_path(script, run_name='__main__')
    return 0
