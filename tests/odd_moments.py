"""What must hold at odd moments: threads that share a model, kill -9 while saving, two downloads into one empty cache.

For tests/test_odd_input.py and .ci/fuzz.py. Each takes a random generator, and an empty folder for its files.
"""
import copy
import os
import signal
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

import timm
import torch

from odd_input import Refused, attempt
from test_hub_configs import MODEL, assert_same
from timm_sape import hub, list_encodings
from timm_sape.cli.files import write_files

POS_ENCS = ['ape+sape2_k+rope2d', 'rpb', 'auto_rope2d+cope', 'cpb+sincos2d', 'ape', 'irpe_qkv']


def saved(rng, folder):
    """A model no parameter of which is what it was at the start, and where `hub.save` has put it."""
    return _saved(rng.choice(POS_ENCS), folder)


@cache
def _saved(pos_enc, folder):
    model = timm.create_model('test_vit_pos_enc', **{**MODEL, 'pos_enc': pos_enc, 'pos_enc_kwargs': {}}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    hub.save(model, folder / pos_enc)
    return model, folder / pos_enc


def new_folder(folder):
    return Path(tempfile.mkdtemp(dir=folder))


def forked(function):
    """Run a function in a process that shares nothing with this one but files. Returns its number.

    The process ends with 0, 2 if the package has refused, or 1.
    """
    child = os.fork()
    if not child:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            function()
            os._exit(0)
        except Refused:
            os._exit(2)
        except BaseException:
            os._exit(1)
    return child


def kills(rng, folder):
    """kill -9 while files are written: a file is the old one or the new one, a folder is whole or not there."""
    model, place, old, new = saved(rng, folder)[0], new_folder(folder), 'old' * 10 ** 5, 'new' * 10 ** 5
    file = place / 'table.csv'
    file.write_text(old)

    def save():
        write_files({file: lambda path: path.write_text(new)}, force=True)
        hub.save(model, place / 'model')

    child = forked(save)
    time.sleep(rng.uniform(0, rng.choice([0.01, 0.15])))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert file.read_text() in (old, new)
    if not (place / 'model').exists():
        hub.save(model, place / 'model')
    assert_same(hub.load(place / 'model'), model)


def downloads(rng, folder, served):
    """Two processes load into one empty cache, from the Hub at HF_ENDPOINT, whose connection may break off."""
    (model, source), place = saved(rng, folder), new_folder(folder)
    repo = f'someone/{source.name.replace("+", "-")}'
    served.repos[repo] = {'private': False, 'commits': {}, 'branches': {}}
    served.commit(repo, {path.name: path.read_bytes() for path in source.iterdir()})
    faults = rng.choice([[], [], ['reset'], ['short'], ['tamper'], ['close']])
    served.faults = {rng.choice(['config.json', 'model.safetensors']): [*faults]}

    def load():
        assert_same(attempt(hub.load, repo, cache_dir=place), model)

    children = [forked(load), forked(load)]
    codes = {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
    assert codes <= ({0, 2} if faults else {0}), f'exit codes {codes}'
    served.faults = {}
    load()


def threads(rng, folder):
    """Threads share a model, on images of several sizes: each gets what it gets alone."""
    model = attempt(
        timm.create_model, 'test_vit_pos_enc', pos_enc='+'.join({'ape', rng.choice(list_encodings())}), img_size=16,
        patch_size=8, embed_dim=16, num_heads=2, depth=2, num_classes=3, dynamic_img_size=True).eval()
    images = [torch.randn(2, 3, 8 * rng.randint(1, 4), 8 * rng.randint(1, 4)) for _ in range(6)]
    same = []

    @torch.no_grad()
    def run(order):
        same.extend(torch.equal(model(images[i]), alone[i]) for i in order)

    with torch.no_grad():
        alone = [copy.deepcopy(model)(x) for x in images]
    workers = [threading.Thread(target=run, args=(rng.sample(range(6), 6),)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(same) == 24 and all(same)
