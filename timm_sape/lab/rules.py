"""The rules that a model has for other sizes than the trained one, by name."""
from typing import Any, Dict, Optional, Sequence

import torch.nn as nn

from ..encodings import LOGIT_SCALINGS, get_encoding, list_encodings
from ..host import PosEncModel

__all__ = ['own_rule', 'rules_of']


def rules_of(model: nn.Module, only: Optional[Sequence[str]] = None, name: str = '') -> Dict[str, Dict[str, Any]]:
    """The arguments of `load_model` that choose each rule, by the name of the rule.

    The name is the value of the encodings' keyword `resolution`, or 'own' where they have a single rule; and the same
    with '+log' for `logit_scaling='log'`. If several encodings have the keyword, they all get the rule; one that lacks
    it is rescaled then. A model of timm has the rule 'timm'.

    Args:
        model: As it was loaded without further arguments.
        only: Names to keep. Default: all.
        name: What the message calls the model.

    Raises:
        ValueError: If the model has none of the rules in `only`, or one of them is no rule of any encoding.
    """
    known = {rule for part in list_encodings() for rule in get_encoding(part).rules} | {'own'}
    known = {_name(rule, scaling) for rule in known for scaling in LOGIT_SCALINGS} | {'timm'}
    unknown = [rule for rule in only or () if rule not in known]
    if unknown:
        raise ValueError(f'There is no rule {unknown[0]!r}. Rules: {", ".join(sorted(known))}.')
    if not isinstance(model, PosEncModel):
        found: Dict[str, Dict[str, Any]] = {'timm': {}}
    else:
        encodings = {part: get_encoding(part).rules for part in model.pos_enc.split('+')}
        encodings = {part: rules for part, rules in encodings.items() if rules}
        grid = model._model_args.get('ref_grid_size') or model.grid_size
        found = {}
        for scaling in LOGIT_SCALINGS:
            for rule in dict.fromkeys(rule for rules in encodings.values() for rule in rules) or ['own']:
                chosen = {
                    part: {**model.pos_enc_kwargs.get(part, {}), 'resolution': rule if rule in rules else 'rescale'}
                    for part, rules in encodings.items()}
                found[_name(rule, scaling)] = {
                    'logit_scaling': scaling, 'ref_grid_size': tuple(grid),
                    **({'pos_enc_kwargs': {**model.pos_enc_kwargs, **chosen}} if chosen else {})}
    kept = {rule: kwargs for rule, kwargs in found.items() if only is None or rule in only}
    if not kept:
        raise ValueError(f'{name or "The model"} has none of the rules {", ".join(only)}. It has {", ".join(found)}.')
    return kept


def own_rule(model: nn.Module) -> str:
    """The name of the rule that a model has as it is; empty if its encodings have different ones."""
    if not isinstance(model, PosEncModel):
        return 'timm'
    chosen = {
        model.pos_enc_kwargs.get(part, {}).get('resolution', get_encoding(part).rules[0])
        for part in model.pos_enc.split('+') if get_encoding(part).rules} or {'own'}
    return _name(chosen.pop(), model.logit_scaling) if len(chosen) == 1 else ''


def _name(rule: str, scaling: str) -> str:
    return rule if scaling == 'constant' else f'{rule}+{scaling}'
