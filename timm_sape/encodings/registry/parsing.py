"""Strings such as `pos_enc='ape+auto_rope2d'`, and the keywords of their parts."""
import ast
import json
import re
from typing import Any, Dict, List, Mapping, Optional

from ...checks import MAX_INTEGER
from ..base import AUTO
from .names import check_keywords, get_encoding, resolve


def merge_keywords(
        saved: Optional[Mapping[str, Mapping[str, Any]]],
        given: Optional[Mapping[str, Mapping[str, Any]]],
) -> Dict[str, Dict[str, Any]]:
    """`pos_enc_kwargs` of a saved model, with the caller's in place of some of them. All others stay.

    Args:
        saved: Keywords of each part, by its name.
        given: The same. Names may lack the `auto_` that they have in `saved`, or the reverse.

    Raises:
        ValueError: If a name is unknown, or keywords are not plain JSON.
    """
    merged = {resolve(name): values for name, values in plain_keywords(saved).items()}
    for name, values in plain_keywords(given).items():
        part = resolve(name)
        part = next((own for own in merged if own.removeprefix(AUTO) == part.removeprefix(AUTO)), part)
        merged[part] = {**merged.get(part, {}), **values}
    return merged


def parse_pos_enc(
        pos_enc: str,
        pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]] = None,
) -> Dict[str, Dict[str, Any]]:
    """Split a string such as `'sape2+ape'` into its parts, with aliases resolved.

    Args:
        pos_enc: Names joined by `+`, or `'nope'`.
        pos_enc_kwargs: Keywords of each part, by its name.

    Returns:
        Keywords of each part by its canonical name, sorted by name. A model is saved with `'+'.join` of these names.

    Raises:
        ValueError: If a part is unknown, repeated, empty or in conflict with another, or if keywords are for a part
            that `pos_enc` does not have, are not accepted by their part, or are not plain JSON.
    """
    if not isinstance(pos_enc, str):
        raise ValueError(f"pos_enc must be a string such as 'ape+sape2_k', got {pos_enc!r}.")
    names = [name.strip() for name in pos_enc.split('+')]
    if not all(names):
        raise ValueError(f"pos_enc={pos_enc!r} has an empty part. Write e.g. 'ape+sape2_k', or 'nope' for none.")
    resolved = [resolve(name) for name in names]
    _check_composition(pos_enc, resolved)

    keywords: Dict[str, Dict[str, Any]] = {name: {} for name in sorted(resolved)}
    given = plain_keywords(pos_enc_kwargs)
    seen = set()
    for name, values in given.items():
        part = resolve(name)
        if part not in keywords:
            others = [other for other in keywords if other.removeprefix(AUTO) == part.removeprefix(AUTO)]
            hint = f'Write {others[0]!r}, or' if others else 'Leave them out, or'
            raise ValueError(
                f'pos_enc_kwargs has keywords for {name!r}, which is not a part of pos_enc={pos_enc!r}. {hint} put '
                f'{part!r} into pos_enc.')
        if part in seen:
            raise ValueError(f'pos_enc_kwargs has keywords for {part!r} under two names. Give them once.')
        seen.add(part)
        check_keywords(part, values)
        for keyword, value in values.items():
            if _largest_integer(value) > MAX_INTEGER:
                raise ValueError(
                    f'Position encoding {part!r}: {keyword}={value!r} is larger than any model needs. Give at most '
                    f'{MAX_INTEGER:,}.')
        keywords[part] = values
    return keywords


def _largest_integer(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_largest_integer, inner), default=abs(value) if isinstance(value, int) else 0)


def _check_composition(pos_enc: str, resolved: List[str]) -> None:
    plain = [name.removeprefix(AUTO) for name in resolved]
    for name in plain:
        if plain.count(name) > 1:
            raise ValueError(f'pos_enc={pos_enc!r} names {name!r} more than once. Name it once.')
    if 'nope' in plain and len(plain) > 1:
        raise ValueError(
            f"pos_enc={pos_enc!r}: 'nope' means no position encoding and cannot be combined. Leave it out.")
    classes = [get_encoding(name) for name in plain]
    for name, cls in zip(resolved, classes):
        for other in cls.excludes.keys() & set(plain):
            raise ValueError(
                f'pos_enc={pos_enc!r}: {name!r} cannot be combined with {other!r}: {cls.excludes[other]}. Keep one of '
                'them.')
    rotations = [name for name, cls in zip(resolved, classes) if cls.rotates()]
    if len(rotations) > 1:
        raise ValueError(f'pos_enc={pos_enc!r} has two rotations, {" and ".join(rotations)}. Keep one of them.')
    adds = any(cls.overrides('embed') and not cls.per_layer for cls in classes)
    if any(cls.overrides('mix') for cls in classes) and not adds:
        raise ValueError(
            f'pos_enc={pos_enc!r} mixes tokens with their position terms, but no part adds such a term. '
            "Add one, e.g. 'pemix+sincos2d'.")


def plain_keywords(pos_enc_kwargs: Optional[Mapping[str, Mapping[str, Any]]]) -> Dict[str, Dict[str, Any]]:
    """The keywords of each part, as they are after a round trip through JSON.

    Raises:
        ValueError: If they are not plain JSON, or not a mapping of mappings.
    """
    if isinstance(pos_enc_kwargs, str):
        meant = _meant_by(pos_enc_kwargs) or {'sape2_k': {'preset': 'equations'}}
        raise ValueError(
            f'pos_enc_kwargs must map parts to their keywords, got the text {pos_enc_kwargs!r}. On a command line, '
            f'quote it and the names in it: --model-kwargs "pos_enc_kwargs={meant}".')
    given = _plain_json({} if pos_enc_kwargs is None else pos_enc_kwargs)
    if not isinstance(given, dict) or not all(isinstance(v, dict) for v in given.values()):
        raise ValueError(
            "pos_enc_kwargs must map parts to their keywords, e.g. {'sape2_k': {'preset': 'equations'}}, "
            f'got {pos_enc_kwargs!r}.')
    return given


def _meant_by(text: str) -> Optional[Dict[str, Dict[str, Any]]]:
    """The keywords in a text that is JSON, or that a shell has stripped of its quotes. None if it makes no sense."""
    constants = {'true': 'True', 'false': 'False', 'null': 'None', 'True': 'True', 'False': 'False', 'None': 'None'}

    def quote(match: re.Match) -> str:
        word = match[0]
        return word if word[0] in '\'"' else constants.get(word, repr(word))

    try:
        meant = ast.literal_eval(re.sub(r'"[^"]*"|\'[^\']*\'|(?<![\w.])[A-Za-z_]\w*', quote, text))
    except (SyntaxError, ValueError):
        return None
    return meant if isinstance(meant, dict) and all(isinstance(v, dict) for v in meant.values()) else None


def _plain_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as e:
        raise ValueError(f'pos_enc_kwargs must be plain JSON, so that it can be saved, got {value!r}: {e}.') from None
