"""Save models to a folder or to the Hugging Face Hub, and load them: timm's own files, with a card and with checks.

`timm.create_model('hf-hub:...')` and transformers' `AutoModelForImageClassification` read what `push` writes, once this
package is imported. `load` reads it too, and checks more. So that it can, config.json has the version of this package
that wrote it, and the checksum of the weights:

    "timm_sape": {"version": "0.1.0", "sha256": "..."}

The checksum finds damaged or exchanged files, not attacks: whoever can write to a repository can change both. A commit
hash as `revision=` pins both.

    saving.py    `save` and `push`
    loading.py   `load`
    card.py      the model card
    config.py    which entries config.json has, and which values are right
    fit.py       whether config.json describes the model that the weights are of
    files.py     whether the files are as they were written
    errors.py    errors of the Hub and of timm in one line
"""
from .loading import load
from .saving import push, save

__all__ = ['load', 'push', 'save']
