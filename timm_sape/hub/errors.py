"""Errors of the Hub, of its client and of timm in one line that says what to do."""
import errno
from contextlib import contextmanager
from typing import Any, Iterator, Optional

from huggingface_hub import constants, get_session
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from timm.models._hub import HF_SAFE_WEIGHTS_NAME

AGAIN = 'Copy it again, or save the model again.'


def described(error: BaseException) -> str:
    """An error in one line that is not too long. It names the type, unless the message is meant for users."""
    text = ' '.join(str(error).split())
    return _cut(text if type(error) is ValueError else f'{type(error).__name__}: {text}', 500)


def short(value: Any) -> str:
    return _cut(repr(value), 60)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f'{text[:most]} ...'


def no_pickles(name: str) -> str:
    if name != HF_SAFE_WEIGHTS_NAME:
        return ''
    return (
        ' Pickles, which can execute code, are not read. Save the model by timm_sape.hub, or by timm with '
        'safe_serialization=True.')


def why_unreachable() -> Optional[Exception]:
    """Why the Hub does not answer. None if it does.

    huggingface_hub asks seven times for a file that is not in the cache, with 23 seconds of pauses. This asks once.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as e:  # its type depends on the HTTP client
        return e
    return None


@contextmanager
def plain_errors(
        repo_id: str,
        revision: Optional[str],
        name: str = 'the model',
        unreachable: Optional[Exception] = None,
) -> Iterator[None]:
    """Turn the many errors of huggingface_hub and its HTTP client into one line.

    Args:
        repo_id: The repository.
        revision: Its revision.
        name: The file to download.
        unreachable: Why the Hub does not answer.
    """
    try:
        yield
    except Exception as e:  # versions of huggingface_hub have different HTTP clients, without a common class of errors
        status = getattr(getattr(e, 'response', None), 'status_code', None)
        if isinstance(e, LocalEntryNotFoundError):  # first, as it is a subclass of EntryNotFoundError
            error = ConnectionError(
                f'{constants.ENDPOINT} cannot be reached ({described(unreachable or e.__cause__ or e)}), and {name} '
                f'of {repo_id} is not in the cache.')
        elif isinstance(e, GatedRepoError):
            error = ValueError(f'{repo_id} is gated: ask for access on its page, and give a token of that account.')
        elif isinstance(e, RepositoryNotFoundError):
            error = ValueError(
                f'There is no repository {repo_id!r} at {constants.ENDPOINT}, or it is private and no token of an '
                'account that may see it was given (token=, HF_TOKEN, `hf auth login`).')
        elif isinstance(e, RevisionNotFoundError):
            error = ValueError(f'{repo_id} has no revision {revision!r}.')
        elif isinstance(e, EntryNotFoundError):
            error = ValueError(f'{repo_id} has no {name}.{no_pickles(name)}')
        elif isinstance(e, HFValidationError):
            error = ValueError(f'{repo_id!r} is neither an existing folder nor OWNER/NAME of a repository.')
        elif status == 401:
            error = ValueError(
                f'{constants.ENDPOINT} does not accept the token (token=, HF_TOKEN, `hf auth login`): is it whole, and '
                'still valid?')
        elif status == 403:
            error = ValueError(f'The account of the token has no permission for this in {repo_id}.')
        elif getattr(e, 'errno', None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error = OSError(
                e.errno, f'The disk is full, or a limit for files is reached: no room for {name} of {repo_id}. Make '
                'room, or choose another disk by HF_HOME or cache_dir=')
        elif isinstance(e, (ValueError, TypeError)) or getattr(e, 'errno', None) is not None:
            raise
        else:
            reason = f'{type(e).__name__}: {str(e).strip()}'.splitlines()[0]  # the other lines are advice for others
            error = ConnectionError(
                f'The connection to {constants.ENDPOINT} failed ({reason}). Incomplete files are not used; try again.')
        raise error from e
