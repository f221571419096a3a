"""Read plans: YAML files that name a recipe, models and seeds."""
import ast
import difflib
import importlib
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

import yaml

from ...loading import reads_folders

__all__ = ['ARCHIVE', 'OUTPUTS', 'SPLITS', 'Option', 'Plan', 'Run', 'import_modules', 'load_plan', 'script_options']

KEYS = ('recipe', 'models', 'seeds', 'baseline', 'args')
OUTPUTS = ('.csv', '.md', '.png')  # files named after the plan, beside the folders of the models
ARCHIVE = 'runs.jsonl'  # in the same folder
SPLITS = {'train_split': 'train', 'val_split': 'validation'}  # options of train.py and their defaults
# The command sets these options of train.py itself. A recipe may contain them, because the args.yaml of a run does.
OURS = ('data', 'data_dir', 'output', 'experiment', 'resume', 'start_epoch', 'seed')
TEXTS = ('model', *SPLITS, 'dataset', 'class_map')
# Options that the estimate computes with, and their smallest values.
COUNTS = {'epochs': 1, 'batch_size': 1, 'val_interval': 1, 'workers': 0}
UNKNOWN = object()  # a default that the source does not tell
# train.py fills these arguments of create_model from its options of the given names. model_kwargs must not repeat them.
FILLED = {
    'bn_eps': 'bn_eps', 'bn_momentum': 'bn_momentum', 'checkpoint_path': 'initial_checkpoint',
    'drop_block_rate': 'drop_block', 'drop_path_rate': 'drop_path', 'drop_rate': 'drop', 'global_pool': 'gp',
    'in_chans': 'in_chans', 'num_classes': 'num_classes', 'pretrained': 'pretrained', 'scriptable': 'torchscript'}


class Run(NamedTuple):
    """One training run.

    Attributes:
        label: Name of the model in the tables.
        seed: Seed for train.py.
        config: Options of train.py, including the seed, without paths.
    """
    label: str
    seed: int
    config: Dict[str, Any]

    @property
    def name(self) -> str:
        return f'{self.label}, seed {self.seed}'

    @property
    def splits(self) -> Dict[str, str]:
        """Image folders in the data directory, by train.py's option. Empty if the recipe names a data set instead."""
        options = SPLITS if reads_folders(self.config.get('dataset', '')) else {}
        found = {option: self.config.get(option, default) for option, default in options.items()}
        return {option: split for option, split in found.items() if split}

    @property
    def epochs(self) -> int:
        """Number of epochs that train.py will run. It depends on the schedule."""
        import torch
        from timm.scheduler import create_scheduler_v2, scheduler_kwargs

        options = Namespace(**{'sched': 'cosine', **self.config, 'sched_on_updates': False})
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        return create_scheduler_v2(optimizer, **scheduler_kwargs(options))[1]

    def folder(self, output: Path) -> Path:
        """The folder that train.py writes to, `output/LABEL/seedN`, with LABEL shortened by `slug`."""
        return output / slug(self.label) / f'seed{self.seed}'


def slug(label: str) -> str:
    """Turn a label into a folder name without spaces, commas, parentheses and other characters that need quoting."""
    return re.sub(r'[^\w.]+', '-', label).strip('-.')


class Plan(NamedTuple):
    """An experiment.

    Attributes:
        recipe: Name of the recipe, which is the name of its folder.
        baseline: Label of the model that the others are compared with.
        runs: All models with the first seed, then all with the second, and so on.
    """
    recipe: str
    baseline: str
    runs: List[Run]

    @property
    def labels(self) -> List[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    def select(self, labels: Optional[Sequence[str]], seeds: Optional[Sequence[int]]) -> List[Run]:
        """Select runs by label and seed; None selects all.

        Raises:
            ValueError: If the plan has no such model or seed.
        """
        known = {run.seed for run in self.runs}
        for what, asked, there in (('model', labels, self.labels), ('seed', seeds, known)):
            for item in asked or ():
                if item not in there:
                    raise ValueError(f'the plan has no {what} {item!r}; it has {", ".join(map(str, there))}')
        return [
            run for run in self.runs
            if (labels is None or run.label in labels) and (seeds is None or run.seed in seeds)]


class Option(NamedTuple):
    """What train.py declares about one of its options.

    Attributes:
        kind: bool, int, float or str; None if the source does not tell.
        many: Whether the option takes several values.
        default: Its default.
    """
    kind: Optional[type]
    many: bool
    default: Any


def load_plan(path: Path, options: Optional[Mapping[str, Optional[Option]]] = None) -> Plan:
    """Read a plan.

    Its keys are `recipe` (a file of options for train.py; the path is relative to the plan), `models` (per label the
    name of a model, or options of train.py that include `model`), `seeds`, and optionally `baseline` (a label; default:
    the first) and `args` (options for all models). The options of a model override `args`, and `args` override the
    recipe. `model_kwargs` are merged key by key.

    Args:
        path: The plan.
        options: What train.py declares, as from `script_options`; an option may be None if only its name is known.
            None to accept any options.

    Raises:
        ValueError: If a file cannot be read, or contains something that train.py would ignore or fail on.
    """
    path = Path(path)
    plan = _load_yaml(path)
    _refuse_unknown(plan, KEYS, str(path))
    for key in ('recipe', 'models', 'seeds'):
        if not plan.get(key):
            raise ValueError(f'{path} has no {key}; a plan has the keys {", ".join(KEYS)}')
    models, seeds = plan['models'], plan['seeds']
    args = {} if plan.get('args') is None else plan['args']
    if not isinstance(plan['recipe'], str):
        raise ValueError(f'{path}: recipe must be the path of a file, got {plan["recipe"]!r}')
    if not isinstance(models, dict):
        raise ValueError(f'{path}: models must be lines of LABEL: MODEL, got {models!r}')
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f'{path}: seeds must be a list of integers of at least 0, such as [1, 2, 3], got {seeds!r}')
    if len(set(seeds)) < len(seeds):
        raise ValueError(f'{path}: seeds has a seed twice: {seeds}. Remove one')
    baseline = plan.get('baseline', next(iter(models)))
    if baseline not in list(models):  # a list, because an unhashable baseline cannot be looked up in a dict
        raise ValueError(f'{path}: the baseline {baseline!r} is not one of the models, {", ".join(map(str, models))}')

    file = path.parent / plan['recipe']
    recipe = {key: value for key, value in _load_yaml(file).items() if key not in OURS}
    _check_options(recipe, options, str(file))
    _check_options(args, options, f'{path}, args')
    _check_labels(models, path)
    configs = {}
    for label, own in models.items():
        where = f'{path}, model {label!r}'
        own = {'model': own} if isinstance(own, str) else own
        _check_options(own, options, where)
        configs[label] = _merged({'device_modules': ['timm_sape']}, recipe, args, own)
        for key in ('model', 'epochs'):
            if not configs[label].get(key):
                raise ValueError(f'{where}: neither the recipe nor the plan sets `{key}`')
        try:
            _ = Run(label, 0, configs[label]).epochs
        except Exception as e:  # timm raises many kinds for a wrong schedule
            texts = [
                key for key, value in configs[label].items()
                if isinstance(value, str) and re.fullmatch(r'[\d.]+(e[-+]?\d+)?', value)]
            is_text = texts and isinstance(e, TypeError)
            hint = f'; YAML reads {", ".join(texts)} as text: write 1.0e-5, not 1e-5, and no quotes' if is_text else ''
            raise ValueError(f'{where}: timm cannot make this schedule: {e}{hint}') from e
    runs = [
        Run(label, seed, {**config, 'seed': seed}) for seed in seeds for label, config in configs.items()]
    return Plan(file.resolve().parent.name, baseline, runs)


def script_options(script: Path) -> Optional[Dict[str, Option]]:
    """Find the options that train.py declares; None if it does not declare them itself.

    train.py silently ignores keys of a YAML file that it does not know, and does not check the types of the others.

    Raises:
        ValueError: If the file is not Python.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError) as e:
        raise ValueError(f'{script} is not a Python script: {e}') from e
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, 'attr', None) == 'add_argument':
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            long = [flag for flag in flags if flag.startswith('--')]
            names = [given['dest'].value] if 'dest' in given else [
                flag.lstrip('-').replace('-', '_') for flag in (long or flags)[:1]]
            found.update(dict.fromkeys(names, _declared(given)))
    return found if {'model', 'epochs'} <= found.keys() else None


def _declared(given: Mapping[str, ast.expr]) -> Option:
    """What the keywords of an `add_argument` call say about the type."""
    def literal(key: str) -> Any:
        try:
            return ast.literal_eval(given[key]) if key in given else None
        except ValueError:  # an expression, such as a function of train.py
            return UNKNOWN

    action, nargs, default = literal('action'), literal('nargs'), literal('default')
    if action in ('store_true', 'store_false'):
        return Option(bool, False, action == 'store_false' if default is None else default)
    kind = {'int': int, 'float': float, 'str': str}.get(getattr(given.get('type'), 'id', None))
    if 'type' not in given and isinstance(default, (str, type(None))):
        kind = str
    if action is not None or nargs == '?':  # values of other types are possible
        kind = None
    return Option(kind, nargs is not None, default)


def import_modules(runs: Iterable[Run]) -> None:
    """Import what `device_modules` names: the modules that register the models and encodings of the runs.

    Raises:
        ValueError: If one of them cannot be imported.
    """
    for run in runs:
        for module in run.config['device_modules'] or ():
            try:
                importlib.import_module(module)
            except ImportError as e:
                raise ValueError(
                    f'{run.label}: device_modules has {module}, which cannot be imported: {e}. If it is a file of '
                    'yours, add its folder to PYTHONPATH') from e


def _check_labels(labels: Iterable[Any], path: Path) -> None:
    folders: Dict[str, str] = {}
    for label in labels:
        where = f'{path}, model {label!r}'
        if not isinstance(label, str) or not re.fullmatch(r'[^./\\|\s][^/\\|\x00-\x1f]{0,99}', label):
            raise ValueError(f'{where}: a label must be text (put it in quotes) that can be the name of a folder')
        folder = slug(label)
        if not folder or len(label.encode()) > 200 or folder in (ARCHIVE, *(path.stem + suffix for suffix in OUTPUTS)):
            raise ValueError(
                f'{where}: a label must have a letter or a digit, at most 200 bytes, and must not be the name of a '
                f'file of this experiment, such as {path.stem}.csv; a folder is named after it')
        other = folders.setdefault(folder.casefold(), label)  # some file systems ignore case
        if other != label:
            raise ValueError(f'{where}: its folder would be {folder!r}, as that of {other!r}; rename one of them')


def _merged(*layers: Dict[str, Any]) -> Dict[str, Any]:
    merged: Dict[str, Any] = {}
    for layer in layers:
        kwargs = {**(merged.get('model_kwargs') or {}), **(layer.get('model_kwargs') or {})}
        merged = {**merged, **layer, 'model_kwargs': kwargs}
    return merged


def _check_options(given: Any, options: Optional[Mapping[str, Optional[Option]]], where: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(
            f'{where}: it must be options of train.py, such as {{lr: 0.001}} (or, for a model, just its name), '
            f'got {given!r}')
    for key in OURS:
        if key in given:
            raise ValueError(f'{where}: the command sets {key} itself; leave it out')
    if 'config' in given:  # train.py reads it from the command line alone
        raise ValueError(f'{where}: train.py would ignore config; write its options here, or name it as the recipe')
    if given.get('no_resume_opt'):
        raise ValueError(
            f'{where}: with no_resume_opt an interrupted run would go on with another optimizer state; leave it out')
    for key in TEXTS:
        if not isinstance(given.get(key, ''), str):
            raise ValueError(f'{where}: {key} must be a name (in quotes if it is a number), got {given[key]!r}')
    try:
        reads_folders(given.get('dataset', ''))
    except ValueError as e:
        raise ValueError(f'{where}: {e}') from e
    for key, least in COUNTS.items():
        if key in given and (type(given[key]) is not int or given[key] < least):
            raise ValueError(f'{where}: {key} must be a number (without quotes) of {least} or more, got {given[key]!r}')
    kwargs = {} if given.get('model_kwargs') is None else given['model_kwargs']
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ValueError(f'{where}: model_kwargs must be a mapping, such as {{img_size: 32}}, got {kwargs!r}')
    modules = [] if given.get('device_modules') is None else given['device_modules']
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ValueError(f'{where}: device_modules must be a list of names, such as [timm_sape], got {modules!r}')
    if options is None:
        return
    _refuse_unknown(given, options, where)
    for key in kwargs:
        if FILLED.get(key) in options:
            raise ValueError(
                f'{where}: train.py has an option for the {key} of a model; write `{FILLED[key]}: {kwargs[key]}` '
                'beside model_kwargs, not in it')
    for key, value in given.items():
        if options[key] is not None and key not in ('model_kwargs', 'device_modules'):
            _check_type(key, value, options[key], where)


def _check_type(key: str, value: Any, option: Option, where: str) -> None:
    """Check a value of a YAML file. argparse converts text to numbers, but does not check anything else."""
    if value is None:
        if option.default is not None and option.default is not UNKNOWN:
            raise ValueError(f'{where}: {key} must not be null; leave it out for the default, {option.default!r}')
        return
    if option.kind is None:
        return
    name = {bool: 'true or false', int: 'an integer', float: 'a number', str: 'text'}[option.kind]
    if option.many:
        if not isinstance(value, list) or not all(_fits(item, option.kind) for item in value):
            raise ValueError(f'{where}: {key} must be a list, each item {name}, such as [1, 2], got {value!r}')
    elif not _fits(value, option.kind) and not _converts(value, option.kind):
        raise ValueError(f'{where}: {key} must be {name}, got {value!r}')


def _fits(value: Any, kind: type) -> bool:
    return type(value) in ((int, float) if kind is float else (kind,))


def _converts(value: Any, kind: type) -> bool:
    try:
        return isinstance(value, str) and kind in (int, float) and kind(value) is not None
    except ValueError:
        return False


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise ValueError(f'{where}: there is no option {key!r}{f"; {near[0]!r} is one" if near else ""}')


def _load_yaml(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text(encoding='utf-8')
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), path)
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f'cannot read {path}: {e}') from e
    except (yaml.YAMLError, RecursionError) as e:
        raise ValueError(f'{path} is not YAML: {" ".join(str(e).split())}') from e
    if not isinstance(loaded, dict):
        raise ValueError(f'{path} must be a mapping, lines of KEY: VALUE')
    return loaded


def _refuse_repeated_keys(node: Optional[yaml.Node], path: Path) -> None:
    """YAML silently takes the last of two equal keys, so a model would be lost."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f'{path}: the key {key!r} is there twice. Remove one')
        for _, value in node.value:
            _refuse_repeated_keys(value, path)
