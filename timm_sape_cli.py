"""The console script `timm-sape`.

Python imports a package before any module in it, and `import timm_sape` imports torch and timm to register models. That
takes seconds. So the command line is parsed once in an empty stand-in for the package: --help, --version and misspelled
options end there, at once. Anything else then runs in the real package. A module inside the package could not do this:
importing it would import the package first.
"""
import sys
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

__all__ = ['main']


def main() -> int:
    """Run the command line of this process; the exit code as of `timm_sape.cli.main`."""
    if 'timm_sape' not in sys.modules:
        stand_in = ModuleType('timm_sape')
        stand_in.__path__ = find_spec('timm_sape').submodule_search_locations
        stand_in.__version__ = version('timm-sape')
        sys.modules['timm_sape'] = stand_in
        from timm_sape.cli import make_parser
        make_parser().parse_args()
        for name in [name for name in sys.modules if name.partition('.')[0] == 'timm_sape']:
            del sys.modules[name]

    from timm_sape.cli import main
    return main()
