"""What an experiment runs: a YAML file that names a recipe, models and seeds."""
import ast
import difflib
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set

import yaml

__all__ = ['OUTPUTS', 'SPLITS', 'Plan', 'Run', 'load_plan', 'script_options']

KEYS = ('recipe', 'models', 'seeds', 'baseline', 'args')
OUTPUTS = ('.csv', '.md', '.png')  # files beside the folders of the models, which have the name of the plan
SPLITS = {'train_split': 'train', 'val_split': 'validation'}  # train.py's options and their defaults
# Options of train.py that the command gives itself. A recipe may have them, as the args.yaml of a run does.
OURS = ('data', 'data_dir', 'output', 'experiment', 'resume', 'start_epoch', 'seed')
# Arguments of create_model that train.py fills from options of these names, and that model_kwargs cannot have as well.
FILLED = {
    'bn_eps': 'bn_eps', 'bn_momentum': 'bn_momentum', 'checkpoint_path': 'initial_checkpoint',
    'drop_block_rate': 'drop_block', 'drop_path_rate': 'drop_path', 'drop_rate': 'drop', 'global_pool': 'gp',
    'in_chans': 'in_chans', 'num_classes': 'num_classes', 'pretrained': 'pretrained', 'scriptable': 'torchscript'}


class Run(NamedTuple):
    """One training.

    Attributes:
        label: Of the model, a row of the tables.
        seed: train.py's.
        config: train.py's options by name, without where things lie.
    """
    label: str
    seed: int
    config: Dict[str, Any]

    @property
    def name(self) -> str:
        return f'{self.label}, seed {self.seed}'

    @property
    def splits(self) -> Dict[str, str]:
        """Folders of images in the data directory, by train.py's option; none for a data set that has a name."""
        options = {} if self.config.get('dataset') else SPLITS
        found = {option: self.config.get(option, default) for option, default in options.items()}
        return {option: split for option, split in found.items() if split}

    @property
    def epochs(self) -> int:
        """How many epochs train.py makes of it, which depends on the schedule."""
        import torch
        from timm.scheduler import create_scheduler_v2, scheduler_kwargs

        options = Namespace(**{'sched': 'cosine', **self.config, 'sched_on_updates': False})
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        return create_scheduler_v2(optimizer, **scheduler_kwargs(options))[1]

    def folder(self, output: Path) -> Path:
        return output / self.label / f'seed{self.seed}'


class Plan(NamedTuple):
    """An experiment.

    Attributes:
        recipe: Name of the recipe, that of the folder it lies in.
        baseline: Label of the model that the others are compared with.
        runs: All models of the first seed, then those of the second, and so on.
    """
    recipe: str
    baseline: str
    runs: List[Run]

    @property
    def labels(self) -> List[str]:
        return list(dict.fromkeys(run.label for run in self.runs))

    def select(self, labels: Optional[Sequence[str]], seeds: Optional[Sequence[int]]) -> List[Run]:
        """Some of the runs; None for all models or seeds.

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


def load_plan(path: Path, options: Optional[Set[str]] = None) -> Plan:
    """Read a plan.

    It has the keys `recipe` (a file of options for train.py, its path relative to the plan), `models` (for each label
    the name of a model, or options of train.py with `model` among them), `seeds`, and if wanted `baseline` (a label;
    default: the first) and `args` (options for all models). Later ones beat earlier ones: recipe, args, the model's;
    but `model_kwargs` are merged key by key.

    Args:
        path: Of the plan.
        options: Those that train.py knows, as `script_options` finds them; None for any.

    Raises:
        ValueError: If a file cannot be read, or says something that train.py would not do.
    """
    path = Path(path)
    plan = _load_yaml(path)
    _refuse_unknown(plan, KEYS, str(path))
    for key in ('recipe', 'models', 'seeds'):
        if not plan.get(key):
            raise ValueError(f'{path} has no {key}; a plan has the keys {", ".join(KEYS)}')
    models, seeds, args = plan['models'], plan['seeds'], plan.get('args') or {}
    if not isinstance(plan['recipe'], str):
        raise ValueError(f'{path}: recipe must be the path of a file, got {plan["recipe"]!r}')
    if not isinstance(models, dict):
        raise ValueError(f'{path}: models must be lines of LABEL: MODEL, got {models!r}')
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ValueError(f'{path}: seeds must be a list of integers of at least 0, such as [1, 2, 3], got {seeds!r}')
    if len(set(seeds)) < len(seeds):
        raise ValueError(f'{path}: a seed is there twice, in {seeds}')
    baseline = plan.get('baseline', next(iter(models)))
    if baseline not in list(models):  # a dictionary cannot be asked for a list
        raise ValueError(f'{path}: the baseline {baseline!r} is none of the models, {", ".join(map(str, models))}')

    file = path.parent / plan['recipe']
    recipe = {key: value for key, value in _load_yaml(file).items() if key not in OURS}
    _check_options(recipe, options, str(file))
    _check_options(args, options, f'{path}, args')
    configs = {}
    for label, own in models.items():
        where = f'{path}, model {label!r}'
        if not isinstance(label, str) or not re.fullmatch(r'[^./\\|\s][^/\\|\x00-\x1f]{0,99}', label):
            raise ValueError(f'{where}: a label must be text (put it in quotes) that can be the name of a folder')
        if len(label.encode()) > 200 or label in [path.stem + suffix for suffix in OUTPUTS]:
            raise ValueError(
                f'{where}: a label must be at most 200 bytes long, and no name of a file of this experiment, such as '
                f'{path.stem}.csv; it is the name of a folder')
        own = {'model': own} if isinstance(own, str) else own
        _check_options(own, options, where)
        configs[label] = _merged({'device_modules': ['timm_sape']}, recipe, args, own)
        if not configs[label].get('model'):
            raise ValueError(f'{where}: it has no `model`, and the recipe neither')
        if type(configs[label].get('epochs')) is not int or configs[label]['epochs'] < 1:
            raise ValueError(
                f'{where}: `epochs` must be said, in the recipe or the plan, as a number (no text) of 1 or more, '
                f'got {configs[label].get("epochs")!r}')
        try:
            _ = Run(label, 0, configs[label]).epochs
        except Exception as e:  # whatever timm says of a schedule
            texts = [
                key for key, value in configs[label].items()
                if isinstance(value, str) and re.fullmatch(r'[\d.]+(e[-+]?\d+)?', value)]
            hint = f'; YAML reads {texts[0]} as text: write 1.0e-5, not 1e-5, and no quotes' if texts else ''
            raise ValueError(f'{where}: timm makes no such schedule: {e}{hint}') from e
    runs = [
        Run(label, seed, {**config, 'seed': seed}) for seed in seeds for label, config in configs.items()]
    return Plan(file.resolve().parent.name, baseline, runs)


def script_options(script: Path) -> Optional[Set[str]]:
    """Names of the options that train.py declares, None if it does not declare them itself.

    train.py does not complain of an unknown key in a YAML file, it leaves it out.

    Raises:
        ValueError: If it is no Python.
    """
    try:
        tree = ast.parse(script.read_text())
    except (SyntaxError, UnicodeDecodeError) as e:
        raise ValueError(f'{script} is no Python script: {e}') from e
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, 'attr', None) == 'add_argument':
            flags = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            given = [keyword.value.value for keyword in node.keywords if keyword.arg == 'dest']
            long = [flag for flag in flags if flag.startswith('--')]
            names.update(given or [flag.lstrip('-').replace('-', '_') for flag in (long or flags)[:1]])
    return names if {'model', 'epochs'} <= names else None


def _merged(*layers: Dict[str, Any]) -> Dict[str, Any]:
    merged: Dict[str, Any] = {}
    for layer in layers:
        kwargs = {**(merged.get('model_kwargs') or {}), **(layer.get('model_kwargs') or {})}
        merged = {**merged, **layer, 'model_kwargs': kwargs}
    return merged


def _check_options(given: Any, options: Optional[Set[str]], where: str) -> None:
    if not isinstance(given, dict):
        raise ValueError(
            f'{where}: it must be options of train.py, such as {{lr: 0.001}} (of a model its name is enough), '
            f'got {given!r}')
    for key in OURS:
        if key in given:
            raise ValueError(f'{where}: {key} is set by the command; leave it out')
    for key in ('model', *SPLITS):
        if not isinstance(given.get(key, ''), str):
            raise ValueError(f'{where}: {key} must be a name (in quotes if it is a number), got {given[key]!r}')
    kwargs = given.get('model_kwargs') or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f'{where}: model_kwargs must be a mapping, such as {{img_size: 32}}')
    modules = given.get('device_modules') or []
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise ValueError(f'{where}: device_modules must be a list of names, such as [timm_sape], got {modules!r}')
    if options is not None:
        _refuse_unknown(given, options, where)
        for key in kwargs:
            if FILLED.get(key) in options:
                raise ValueError(
                    f'{where}: train.py has an option for the {key} of a model; write `{FILLED[key]}: {kwargs[key]}` '
                    'beside model_kwargs, not in it')


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise ValueError(f'{where}: there is no option {key!r}{f"; {near[0]!r} is one" if near else ""}')


def _load_yaml(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text()
        _refuse_twice(yaml.compose(text, yaml.SafeLoader), path)
        loaded = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f'cannot read {path}: {e}') from e
    except yaml.YAMLError as e:
        raise ValueError(f'{path} is no YAML: {" ".join(str(e).split())}') from e
    if not isinstance(loaded, dict):
        raise ValueError(f'{path} must be a mapping, lines of KEY: VALUE')
    return loaded


def _refuse_twice(node: Optional[yaml.Node], path: Path) -> None:
    """YAML takes the last of two equal keys and says nothing; a row would be lost."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f'{path}: {key!r} is there twice')
        for _, value in node.value:
            _refuse_twice(value, path)
