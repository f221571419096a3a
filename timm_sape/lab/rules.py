"""The rules that a model has for other sizes than the trained one, by name."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch.nn as nn

from ..encodings import LOGIT_SCALINGS, get_encoding, list_encodings
from ..host import PosEncModel

__all__ = ['own_rule', 'rules_of', 'trained_grid']

Choice = Dict[str, str]  # the rule of each part that has several


def rules_of(model: nn.Module, only: Optional[Sequence[str]] = None, name: str = '') -> Dict[str, Dict[str, Any]]:
    """The arguments of `load_model` that choose each rule, by the name of the rule.

    The name is the value of the encodings' keyword `resolution`, or 'own' where they have a single rule; and the same
    with '+log' for `logit_scaling='log'`. A model of timm has the rule 'timm'.

    If several encodings have the keyword, the name says what each gets: 'rope2d=ntk,alibi2d=rescale'. Of all
    combinations these are tried: one rule for all, where one that lacks it is rescaled; and each rule of the first
    encoding while the others keep theirs.

    Args:
        model: As it was loaded without further arguments.
        only: Names to keep. Default: all. Where several encodings have the keyword, any combination may be named; and
            'ntk' stands for those above in which each encoding that has this rule gets it.
        name: What the message calls the model.

    Raises:
        ValueError: If the model has none of the rules in `only`, or one of them is no rule of any encoding.
    """
    for rule in only or ():
        _check_known(rule)
    if not isinstance(model, PosEncModel):
        found: Dict[str, Dict[str, Any]] = {'timm': {}}
        kept = {rule: kwargs for rule, kwargs in found.items() if only is None or rule in only}
    else:
        parts = _parts(model)
        choices = [(choice, scaling) for scaling in LOGIT_SCALINGS for choice in _choices(parts, _own_choice(model))]
        found = {_name(*case): _arguments(model, *case) for case in choices}
        kept = {
            _name(choice, scaling): _arguments(model, choice, scaling) for choice, scaling in choices
            if only is None or any(_is_meant(rule, choice, scaling, parts) for rule in only)}
        for rule in only or ():
            choice, scaling = _parsed(rule)
            if choice.keys() == parts.keys() and all(choice[part] in parts[part] for part in parts) and parts:
                choice = {part: choice[part] for part in parts}
                kept.setdefault(_name(choice, scaling), _arguments(model, choice, scaling))
    if not kept:
        raise ValueError(f'{name or "The model"} has none of the rules {", ".join(only)}. It has {", ".join(found)}.')
    return kept


def own_rule(model: nn.Module) -> str:
    """The name of the rule that a model has as it is."""
    return _name(_own_choice(model), model.logit_scaling) if isinstance(model, PosEncModel) else 'timm'


def trained_grid(model: nn.Module) -> Optional[Tuple[int, int]]:
    """(H, W) in patches of the images that a model was trained on. None if it does not say."""
    grid = model._model_args.get('ref_grid_size') if isinstance(model, PosEncModel) else None
    return None if grid is None else tuple(grid)


def _parts(model: PosEncModel) -> Dict[str, Tuple[str, ...]]:
    """The rules of each encoding of a model that has several."""
    rules = {part: get_encoding(part).rules for part in model.pos_enc.split('+')}
    return {part: of_part for part, of_part in rules.items() if of_part}


def _own_choice(model: PosEncModel) -> Choice:
    return {
        part: model.pos_enc_kwargs.get(part, {}).get('resolution', rules[0]) for part, rules in _parts(model).items()}


def _choices(parts: Dict[str, Tuple[str, ...]], own: Choice) -> List[Choice]:
    """The combinations to try, see `rules_of`. One without parts, of a model with a single rule."""
    alike = [
        {part: rule if rule in rules else 'rescale' for part, rules in parts.items()}
        for rule in dict.fromkeys(rule for rules in parts.values() for rule in rules)]
    first = next(iter(parts), None)
    others = [{**own, first: rule} for rule in parts.get(first, ())]
    distinct = {tuple(choice.items()): choice for choice in [*alike, *others]}
    return list(distinct.values()) or [{}]


def _arguments(model: PosEncModel, choice: Choice, scaling: str) -> Dict[str, Any]:
    kwargs = {'logit_scaling': scaling, 'ref_grid_size': trained_grid(model) or tuple(model.grid_size)}
    if choice:
        chosen = {
            part: {**model.pos_enc_kwargs.get(part, {}), 'resolution': rule} for part, rule in choice.items()}
        kwargs['pos_enc_kwargs'] = {**model.pos_enc_kwargs, **chosen}
    return kwargs


def _name(choice: Choice, scaling: str) -> str:
    if len(choice) > 1:
        rule = ','.join(f'{part}={rule}' for part, rule in choice.items())
    else:
        rule = next(iter(choice.values()), 'own')
    return rule if scaling == 'constant' else f'{rule}+{scaling}'


def _parsed(rule: str) -> Tuple[Choice, str]:
    """The rule of each part that a name states, and the scaling of logits. Nothing of a plain name."""
    rule, scaling = _split(rule)
    return dict(case.split('=', 1) for case in rule.split(',') if '=' in case), scaling


def _split(rule: str) -> Tuple[str, str]:
    for scaling in LOGIT_SCALINGS:
        if rule.endswith(f'+{scaling}'):
            return rule.removesuffix(f'+{scaling}'), scaling
    return rule, 'constant'


def _is_meant(rule: str, choice: Choice, scaling: str, parts: Dict[str, Tuple[str, ...]]) -> bool:
    """Whether a plain name stands for this choice."""
    plain, wanted = _split(rule)
    having = [part for part, rules in parts.items() if plain in rules]
    return scaling == wanted and (all(choice[part] == plain for part in having) if having else _name(
        choice, 'constant') == plain)


def _check_known(rule: str) -> None:
    """
    Raises:
        ValueError: If it is no rule of any encoding.
    """
    rules = {part: get_encoding(part).rules for part in list_encodings()}
    known = {rule for of_part in rules.values() for rule in of_part} | {'own'}
    plain = _split(rule)[0]
    if '=' not in plain:
        if plain not in known and rule != 'timm':
            raise ValueError(f'There is no rule {rule!r}. Rules: {", ".join(sorted(known))}, each also with +log.')
