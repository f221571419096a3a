"""What the tests of examples and other scripts share."""
import argparse
import importlib.util
import json

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
