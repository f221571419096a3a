"""Whether the classes of images are those of a model, in the same order."""
import warnings
from typing import Dict, Iterable, Sequence

import torch
from timm.models._hub import load_model_config_from_hf, load_model_config_from_path
from timm.utils.misc import natural_key
from torch.utils.data import Dataset

from .images import ImageFolder, read_class_map
from .models import find_source, no_retries

__all__ = ['check_classes', 'check_numbering', 'number_classes']


def number_classes(data: Dataset, models: Sequence[str]) -> None:
    """Number the classes of images as the models do.

    Those that train.py trained with `--class-map` name the file. Saved models may have `label_names`, the names of all
    folders of images in their order; but train.py, even if it starts from one, numbers its own classes.

    Args:
        data: From `open_dataset`. If a class map was given there, it stays.
        models: Names as for `load_model`.

    Raises:
        ValueError: If a class map cannot be read, the models number the classes in different ways, a model has only
            some of the classes, or timm's order of their names is not always the same.
    """
    given = getattr(data, 'class_map', None)
    if given or given is None and not hasattr(data, 'reader'):  # one image, or a data set of the caller's own
        return
    sources = {model: find_source(model) for model in models}
    takes_map = hasattr(data, 'reader')  # torchvision's data sets have none, and train.py no class map for them
    advice = 'Give a class map: --class-map FILE.' if takes_map else 'Measure on a folder of images, without --dataset.'
    if not isinstance(data, ImageFolder):
        names = getattr(getattr(data, 'reader', data), 'class_to_idx', None) or {}
        for model, source in sources.items():
            if source.class_map:
                fix = f'Give it, too: --class-map {source.class_map}.' if takes_map else (
                    'It does not apply to a data set of torchvision: measure on a folder of images, without --dataset.')
                raise ValueError(f'{model} was trained with a class map. {fix}')
            numbers = _numbers_by_labels(source.labelled_by, names, advice)
            if any(numbers[name] != number for name, number in names.items()):
                raise ValueError(
                    f'{model} was saved with label_names in another order than the data set has. {advice}')
        return
    if '' in data.by_name:
        return
    numbers = {
        model: read_class_map(source.class_map, data.reader.root) if source.class_map else _numbers_by_labels(
            source.labelled_by, data.by_name, advice)
        for model, source in sources.items()}
    if any(each is data.by_name for each in numbers.values()):
        _refuse_ties(data.by_name)
    first = next(iter(numbers))
    for model in numbers:
        if numbers[model] != numbers[first]:
            raise ValueError(
                f'{first} and {model} number the classes in different ways, by the class maps that they were trained '
                'with, by the label_names that they were saved with, or by the order of names. Measure them one at a '
                'time, or give one map for both: --class-map FILE.')
    data.number(numbers[first])


def _refuse_ties(names: Iterable[str]) -> None:
    """Check that timm's order of classes is the same in each run. Classes 'Cat' and 'cat', '1' and '01' it leaves open.

    Raises:
        ValueError: If it is not.
    """
    names = sorted(names, key=natural_key)
    for first, second in zip(names, names[1:]):
        if natural_key(first) == natural_key(second):
            raise ValueError(
                f'timm orders the classes {first!r} and {second!r} at random, so their numbers may change from run to '
                'run. Rename one, or give a class map.')


def _numbers_by_labels(name: str, by_name: Dict[str, int], advice: str) -> Dict[str, int]:
    """The index of each class in the `label_names` of a saved model. Without them, or if they name none: `by_name`.

    Raises:
        ValueError: If they name some of them.
    """
    if name.startswith('local-dir:'):
        cfg, *_ = load_model_config_from_path(name.removeprefix('local-dir:'))
    elif ':' in name:
        try:
            with no_retries():
                cfg, *_ = load_model_config_from_hf(name.partition(':')[2])
        except Exception:  # load_model says what is wrong
            return by_name
    else:
        return by_name
    labels = cfg.get('label_names') or ()  # timm has dicts, too, of numbers and names
    numbers = {label: index for index, label in (labels.items() if isinstance(labels, dict) else enumerate(labels))}
    unknown = sorted(by_name.keys() - numbers.keys())
    if len(unknown) == len(by_name):
        if numbers and by_name:
            warnings.warn(
                f'The label_names of {name.removeprefix("local-dir:")} have none of the classes of the images, so the '
                f'labels may be wrong. {advice}')
        return by_name
    if unknown:
        raise ValueError(
            f'The label_names of {name.removeprefix("local-dir:")} have only some of the classes of the images, not '
            f'{", ".join(unknown[:5])}. {advice}')
    return {label: int(index) for label, index in numbers.items()}


def check_numbering(data: Dataset, model: torch.nn.Module, name: str) -> None:
    """Warn if a model has another number of classes than the images, whose numbers are a guess without a class map.

    Args:
        data: The images.
        model: The model.
        name: What the message calls it.
    """
    classes = getattr(getattr(data, 'reader', data), 'class_to_idx', None) or {}  # torchvision's have no reader
    num_classes = getattr(model, 'num_classes', 0)
    if '' in classes or classes != getattr(data, 'by_name', classes):
        return
    if num_classes and classes and len(classes) != num_classes:
        warnings.warn(
            f'{name} has {num_classes} classes, and the images have {len(classes)}, so their labels may be wrong: they '
            'are numbered in the order of their names. If some are missing, put train/ with all of them beside the '
            'folder, or give a class map.')


def check_classes(labels: torch.Tensor, num_classes: int) -> None:
    """Check that a model has the classes of all labels.

    Args:
        labels: Class indices of any shape.
        num_classes: Number of classes of the model.

    Raises:
        ValueError: If a label is too large.
    """
    if labels.max() >= num_classes:
        raise ValueError(
            f'There are labels up to {labels.max().item()}, but the model has {num_classes} classes, from 0 on. '
            'Use a model that was trained on these classes.')
