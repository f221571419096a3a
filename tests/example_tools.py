"""What the tests of examples and other scripts share."""
import argparse
import importlib.util
import json
from types import SimpleNamespace

import timm
import torch
import yaml
from timm.utils import random_seed


def load_script(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(root, label, seed, name, num_classes, kwargs, status='finished', **config):
    """A run of `timm-sape experiment` below `root`, whose model has not learned anything."""
    random_seed(seed)
    model = timm.create_model(name, num_classes=num_classes, **kwargs)
    config = {'model': name, 'num_classes': num_classes, 'seed': seed, 'model_kwargs': kwargs, **config}
    folder = root / label / f'seed{seed}'
    folder.mkdir(parents=True)
    (folder / 'config.yaml').write_text(yaml.safe_dump(config))
    (folder / 'run.json').write_text(json.dumps({'label': label, 'status': status}))
    state = {'arch': name, 'state_dict': model.state_dict(), 'args': argparse.Namespace(**config)}
    torch.save(state, folder / 'last.pth.tar')


def watch_fine_tuning(example, num_classes, monkeypatch):
    """A small model, and what a script's `fine_tune` does with it: images, learning rates, the decay of the rates."""
    watched = SimpleNamespace(images=[], rates=[], layer_decay=None)
    create_optimizer, optimizers = example.create_optimizer_v2, []

    def create(model, *args, layer_decay=None, **kwargs):  # timm's needs a model with layers
        watched.layer_decay = layer_decay
        optimizers.append(create_optimizer(model, *args, **kwargs))
        return optimizers[0]

    class Model(torch.nn.Linear):
        def forward(self, x):
            watched.images.append(x)
            watched.rates.append(optimizers[0].param_groups[0]['lr'])
            return super().forward(x.flatten(1))

        def reset_classifier(self, num_classes):
            assert num_classes == self.out_features

    monkeypatch.setattr(example, 'create_optimizer_v2', create)
    watched.model = Model(4, num_classes)
    return watched


def check_mirroring(images, seen):
    """Some of the images were seen as they are, others with left and right exchanged, and nothing else was done."""
    found = [[(x == y).flatten(1).all(1).any().item() for y in (images, images.flip(3))] for x in torch.cat(seen)]
    assert all(map(any, found)) and 0.2 < sum(mirrored for _, mirrored in found) / len(found) < 0.8
