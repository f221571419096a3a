"""Copies, pickles, state dicts and configs: each holds all of a model."""
import copy
import json
import pickle
import tempfile
import weakref
from pathlib import Path

import timm
import torch
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer

from common import GRIDS, HEADS, PATCH
from contract_tools import Contracts, same

contracts = Contracts()


@contracts.add(grids=GRIDS[:2])
def deepcopy(make):
    """A copy is complete, shares nothing with the original, and does not keep it alive."""
    x = make.images()
    model = make()
    expected = model(x)
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.zero_()
    same(twin(x), expected, 'copy', tol=1e-6)
    assert twin.pos_enc == model.pos_enc and twin.ref_grid_size == model.ref_grid_size
    gone = weakref.ref(model)
    del model
    assert gone() is None
    twin.load_state_dict(make().state_dict())
    same(twin(x), expected, 'copy, loaded', tol=1e-6)


@contracts.add(grids=GRIDS[:2])
def pickled(make):
    x = make.images()
    model = make()
    twin = pickle.loads(pickle.dumps(model))
    same(twin(x), model(x), 'pickled model', tol=1e-6)
    twin.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder, 'model.pt'))
        same(torch.load(Path(folder, 'model.pt'), weights_only=False)(x), model(x), 'saved model', tol=1e-6)


@contracts.add(grids=GRIDS[:2])
def state_dict(make):
    """It has timm's entries and those of encodings, under their names, and these are all that a model needs."""
    x = make.images()
    model = make()
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, 'model.pt'))
        state = torch.load(Path(folder, 'model.pt'), weights_only=True)
    fresh = make(random=False)
    fresh.load_state_dict(state)
    same(fresh(x), model(x), 'loaded model', tol=1e-6)
    own = {name for name in state if 'encodings.' in name}
    plain = VisionTransformer(
        img_size=make.img_size(), patch_size=PATCH, embed_dim=32, depth=2, num_heads=HEADS, num_classes=3, reg_tokens=4,
        pos_embed='none' if model.pos_embed is None else 'learn')
    assert state.keys() - own == plain.state_dict().keys(), 'entries that are not the encodings own'
    for name in own:
        assert name.split('encodings.')[1].split('.')[0] in model.pos_enc.split('+'), f'{name} is under no name'


@contracts.add(grids=GRIDS[:2])
def config(make):
    """What timm saves is plain JSON, and enough to make the model again."""
    model = make()
    with tempfile.TemporaryDirectory() as folder:
        save_for_hf(model, folder, safe_serialization=True)
        saved = json.loads(Path(folder, 'config.json').read_text())['model_args']
        assert saved['pos_enc'] == '+'.join(sorted(make.pos_enc.split('+')))
        assert saved.get('ref_grid_size') == (model.ref_grid_size and list(model.ref_grid_size))
        loaded = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    same(loaded(make.images()), model(make.images()), 'model made again', tol=1e-6)


test_contract = contracts.test()
