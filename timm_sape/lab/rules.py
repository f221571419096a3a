"""The rules that a model has for other sizes than the trained one, by name."""
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch.nn as nn

from ..encodings import LOGIT_SCALINGS, get_encoding, list_encodings
from ..host import PosEncModel

__all__ = ['distinct_rules', 'own_rule', 'rules_of', 'trained_grid']

Case = Tuple[Dict[str, str], str]  # the rule of each encoding that has several, and the scaling of the logits
Parts = Dict[str, Tuple[str, ...]]  # the rules of each encoding that has several


def rules_of(model: nn.Module, only: Optional[Sequence[str]] = None, name: str = '') -> Dict[str, Dict[str, Any]]:
    """The arguments of `load_model` that choose each rule, by the name of the rule.

    The name is the value of the encodings' keyword `resolution`, or 'own' where they have a single rule; and the same
    with '+log' for `logit_scaling='log'`. A model of timm has the rule 'timm'.

    If several encodings have the keyword, the name says what each gets: 'alibi2d=rescale,rope2d=ntk'. Of all
    combinations there are these: one rule for all, where an encoding that lacks it is rescaled; and each rule of the
    encoding that has the most, while the others keep theirs.

    Args:
        model: As it was loaded without further arguments.
        only: Names to keep. Default: all. If several encodings have the keyword, any combination may be named, and
            'ntk' stands for those combinations above in which all that have this rule get it.
        name: What the message calls the model.

    Raises:
        ValueError: If the model has none of the rules in `only`, or one of them is no rule of any encoding.
    """
    for rule in only or ():
        _check_known(rule)
    if not isinstance(model, PosEncModel):
        found: Dict[str, Dict[str, Any]] = {'timm': {}}
        kept = {rule: {} for rule in found if only is None or rule in only}
    else:
        parts = _parts(model)
        cases = [(choice, scaling) for scaling in LOGIT_SCALINGS for choice in _choices(parts, _own_choice(model))]
        found = {_name(*case): _arguments(model, *case) for case in cases}
        meant = cases if only is None else [case for rule in only for case in _meant(rule, cases, parts)]
        kept = {_name(*case): _arguments(model, *case) for case in meant}
    if not kept:
        raise ValueError(f'{name or "The model"} has none of the rules {", ".join(only)}. It has {", ".join(found)}.')
    return kept


def distinct_rules(
        rules: Iterable[str],
        default: str,
        size: Tuple[int, int],
        trained_size: Tuple[int, int],
) -> List[str]:
    """Without those that do the same at a size as another.

    At the trained aspect ratio 'slopes' is 'rescale'. At the trained size all rules do the same.

    Args:
        rules: Names, as `rules_of` has them.
        default: The one of them to keep in any case.
        size: (height, width).
        trained_size: (height, width), in the same unit.
    """
    rules = list(rules)
    if size == trained_size:
        return [default]
    if size[0] * trained_size[1] != size[1] * trained_size[0]:
        return rules
    found = {}
    for rule in sorted(rules, key=lambda rule: (rule != default, 'slopes' in rule)):
        found.setdefault(rule.replace('slopes', 'rescale'), rule)
    return [rule for rule in rules if rule in found.values()]


def own_rule(model: nn.Module) -> str:
    """The name of the rule that a model has as it is."""
    return _name(_own_choice(model), model.logit_scaling) if isinstance(model, PosEncModel) else 'timm'


def trained_grid(model: nn.Module) -> Optional[Tuple[int, int]]:
    """(H, W) in patches of the images that a model was trained on. None if its file does not say."""
    grid = model._model_args.get('ref_grid_size') if isinstance(model, PosEncModel) else None
    return None if grid is None else tuple(grid)


def _parts(model: PosEncModel) -> Parts:
    rules = {part: get_encoding(part).rules for part in model.pos_enc.split('+')}
    return {part: of_part for part, of_part in rules.items() if of_part}


def _own_choice(model: PosEncModel) -> Dict[str, str]:
    return {
        part: model.pos_enc_kwargs.get(part, {}).get('resolution', rules[0]) for part, rules in _parts(model).items()}


def _choices(parts: Parts, own: Dict[str, str]) -> List[Dict[str, str]]:
    """The combinations that `rules_of` lists; an empty one if there is nothing to choose."""
    choices = [
        {part: rule if rule in rules else 'rescale' for part, rules in parts.items()}
        for rule in dict.fromkeys(rule for rules in parts.values() for rule in rules)]
    most = max(parts, key=lambda part: len(parts[part]), default=None)
    choices += [{**own, most: rule} for rule in parts.get(most, ())]
    return [choice for i, choice in enumerate(choices) if choice not in choices[:i]] or [{}]


def _meant(name: str, cases: Sequence[Case], parts: Parts) -> List[Case]:
    """What a name stands for, see `rules_of`; nothing if the model does not have it."""
    rule, _, scaling = name.partition('+')
    scaling = scaling or 'constant'
    if '=' in rule:
        choice = dict(pair.split('=') for pair in rule.split(','))
        return [({part: choice[part] for part in parts}, scaling)] if choice.keys() == parts.keys() else []
    having = [part for part, rules in parts.items() if rule in rules]
    is_there = having or rule == 'own' and not parts
    return [
        case for case in cases
        if is_there and case[1] == scaling and all(case[0][part] == rule for part in having)]


def _name(choice: Dict[str, str], scaling: str) -> str:
    if len(choice) > 1:
        rule = ','.join(f'{part}={rule}' for part, rule in choice.items())
    else:
        rule = next(iter(choice.values()), 'own')
    return rule if scaling == 'constant' else f'{rule}+{scaling}'


def _arguments(model: PosEncModel, choice: Dict[str, str], scaling: str) -> Dict[str, Any]:
    chosen = {part: {**model.pos_enc_kwargs.get(part, {}), 'resolution': rule} for part, rule in choice.items()}
    return {
        'logit_scaling': scaling,
        'ref_grid_size': trained_grid(model) or tuple(model.grid_size),
        **({'pos_enc_kwargs': {**model.pos_enc_kwargs, **chosen}} if chosen else {}),
    }


def _check_known(name: str) -> None:
    """
    Raises:
        ValueError: If it is no rule of any encoding, or names one that an encoding does not have.
    """
    rule = name.partition('+')[0]
    known = {each for part in list_encodings() for each in get_encoding(part).rules} | {'own'}
    if '=' in rule:
        pairs = [pair.partition('=') for pair in rule.split(',')]
        for part, _, each in pairs:
            if [other for other, *_ in pairs].count(part) > 1:
                raise ValueError(f'{name!r} has two rules of {part}. Name one.')
            rules = get_encoding(part).rules
            if each not in rules:
                raise ValueError(f'{part} has no rule {each!r}. It has {", ".join(rules) or "a single one, own"}.')
    elif rule not in known and name != 'timm':
        raise ValueError(f'There is no rule {rule!r}. Rules: {", ".join(sorted(known))}; each also with +log.')
    if name not in (rule, *(f'{rule}+{scaling}' for scaling in LOGIT_SCALINGS)):
        raise ValueError(f'There is no rule {name!r}. After + there is only log: {rule}+log.')
