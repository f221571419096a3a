"""Can a trained model be taught other sizes? Rules for other sizes, and grafted encodings, beside each other.

    python examples/retrofit.py RUNS --data-dir DATA --output retrofit

RUNS is a folder of `timm-sape experiment` or of `examples/reference_table.py` with checkpoints; its models are the
bases. DATA has train/ and test/. Each base is tested at several sizes with every rule that its encodings have. Then it
is fine-tuned for a few epochs at its own size: unchanged, and with each of several encodings added, behind a gate that
starts at 0. These are tested likewise. An encoding helps if the model keeps more than the one fine-tuned unchanged,
each with its best rule. The measure is the accuracy above chance, in percent of that of the base at its own size, so
what fine-tuning and the encoding cost or gain at that size counts, too.

The command continues where it stopped: every model that was tested is in OUTPUT/retrofit.jsonl. The tables are in
retrofit.md, a row for each test in retrofit.csv, and retrofit.png shows the bases with all rules.
"""
import argparse
import json
import shutil
from pathlib import Path
from statistics import mean

import timm
import torch
import torch.nn.functional as F
import yaml
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed
from torch.utils.data import DataLoader
from tqdm import tqdm

import timm_sape
from timm_sape.analysis.figures import new_figure
from timm_sape.analysis.inputs import load_model, open_dataset, preprocessing
from timm_sape.lab.experiment import trained_models
from timm_sape.lab.intervals import difference, spread
from timm_sape.lab.machine import about
from timm_sape.lab.sweep import sweep
from timm_sape.lab.tables import markdown, write_csv

BASES = ('APE', 'sincos2d', 'RoPE-2D', 'RoPE-2D mixed')
ENCODINGS = ('fire', 'cpb', 'pape', 'sape2_k')
BATCH = 32


def tensors(data):
    """All images of a data set, `[n, 3, height, width]`, and their labels, `[n]`."""
    images, labels = zip(*DataLoader(data, batch_size=500))
    return torch.cat(images), torch.cat(labels)


def fine_tune(model, images, labels, epochs, lr, name):
    """Train all weights, on images that are mirrored at random. Batches depend on torch's seed alone."""
    optimizer = create_optimizer_v2(model, 'adamw', lr=lr, weight_decay=0.05)
    steps = len(images) // BATCH
    scheduler, _ = create_scheduler_v2(
        optimizer, 'cosine', num_epochs=epochs, warmup_epochs=0, step_on_epochs=False, updates_per_epoch=steps)
    model.train()
    with tqdm(total=epochs * steps, desc=name, unit='step', mininterval=10) as progress:
        for epoch in range(epochs):
            for step, index in enumerate(torch.randperm(len(images))[:steps * BATCH].split(BATCH)):
                scheduler.step_update(epoch * steps + step)
                batch = images[index]
                batch = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, batch, batch.flip(3))
                loss = F.cross_entropy(model(batch), labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.update()
    return model.eval()


def add_encoding(checkpoint, name):
    """The model of a checkpoint with one more encoding in each layer, which changes nothing at the start."""
    base = load_model(str(checkpoint))
    config = yaml.safe_load((checkpoint.parent / 'config.yaml').read_text())
    start = {} if timm_sape.get_encoding(name).gate_init == 1 else {'init': 0}  # 1: it is zero itself
    kwargs = {
        **config['model_kwargs'],
        'pos_enc': f'{base.pos_enc}+auto_{name}',
        'pos_enc_kwargs': {**base.pos_enc_kwargs, f'auto_{name}': start},
    }
    overlay = {key: base.pretrained_cfg[key] for key in ('mean', 'std', 'crop_pct', 'interpolation')}
    family = '_'.join(config['model'].split('_')[:2])  # vit_tiny, test_vit, ...
    model = timm.create_model(
        f'{family}_pos_enc', num_classes=config['num_classes'], pretrained_cfg_overlay=overlay, **kwargs)
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(f'auto_{name}' in key for key in missing), (missing, unexpected)
    return model


def models_of(base, seed, args, images, labels):
    """The models to test, one by one: what was done to the base, and a function that makes a name for `load_model`."""
    def tuned(encoding):
        def make():
            random_seed(seed)
            model = load_model(str(base)) if encoding is None else add_encoding(base, encoding)
            random_seed(seed)  # the same batches for all
            fine_tune(model, images, labels, args.epochs, args.lr, encoding or 'unchanged')
            folder = args.output / 'model'
            shutil.rmtree(folder, ignore_errors=True)
            timm_sape.hub.save(model, folder)
            return f'local-dir:{folder}'
        return make

    return {
        'not fine-tuned': lambda: str(base),
        'unchanged': tuned(None),
        **{encoding: tuned(encoding) for encoding in args.encodings},
    }


def measure(args, trained):
    """Train and test what is missing. Returns all rows."""
    path = args.output / 'retrofit.jsonl'
    rows = list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
    settings = {'epochs': args.epochs, 'lr': args.lr, 'num_images': args.num_images}
    begun = [{key: row[key] for key in settings} for row in rows]
    if any(each != settings for each in begun) or rows and {row['size'] for row in rows} != set(args.sizes):
        raise ValueError(
            f'{args.output} was begun with {begun[0]} and sizes {sorted({row["size"] for row in rows})}, now it is '
            f'{settings} and {sorted(args.sizes)}. Name another --output.')
    done = {(row['base'], row['seed'], row['model']) for row in rows}
    test = open_dataset(args.data_dir)
    train = open_dataset(args.data_dir, split='train')
    train.transform = preprocessing(load_model(str(trained[0].checkpoint)))
    images, labels = tensors(train)
    for label, seed, checkpoint in trained:
        for name, make in models_of(checkpoint, seed, args, images, labels).items():
            if (label, seed, name) in done:
                continue
            found = sweep([make()], test, args.sizes, num_images=args.num_images, batch_size=100, progress=False)
            new = [{
                'base': label,
                'seed': seed,
                'model': name,
                'rule': row['rule'],
                'size': row['height'],
                'top1': row['top1'],
                **settings,
            } for row in found]
            rows += new
            with open(path, 'a') as f:  # all rows of a model at once
                f.write(''.join(json.dumps(row) + '\n' for row in new))
            print(f'{label}, seed {seed}, {name}: done', flush=True)
    return rows


def kept_by(rows, chance, own_size):
    """{base: {(model, rule): {size: {seed: share of accuracy above chance that is left, in percent}}}}."""
    found = {}
    own = {
        (row['base'], row['seed']): row['top1'] - chance
        for row in rows if row['model'] == 'not fine-tuned' and row['size'] == own_size}
    for row in rows:
        share = 100 * (row['top1'] - chance) / own[row['base'], row['seed']]
        lines = found.setdefault(row['base'], {}).setdefault((row['model'], row['rule']), {})
        lines.setdefault(row['size'], {})[row['seed']] = share
    return found


def best_rule(lines, model, size):
    """The shares of a model by seed, with the rule that is best at a size on average."""
    candidates = {rule: sizes[size] for (name, rule), sizes in lines.items() if name == model}
    rule = max(candidates, key=lambda rule: mean(candidates[rule].values()))
    return rule, candidates[rule]


def show(rows, chance, own_size):
    """Tables for people: every rule, then the best rule of each model beside the base fine-tuned unchanged."""
    bases = kept_by(rows, chance, own_size)
    sizes = sorted({row['size'] for row in rows})
    table = []
    for base, lines in bases.items():
        best = {size: best_rule(lines, 'not fine-tuned', size) for size in sizes}
        top1 = {(size, rule): spread([
            row['top1'] for row in rows
            if (row['base'], row['model'], row['size'], row['rule']) == (base, 'not fine-tuned', size, rule)
        ], 1) for size, (rule, _) in best.items()}
        table.append({'base, by its best rule': base, **{
            f'{size} px': f'{rule}: {top1[size, rule]} ({spread(list(shares.values()), 1)})'
            for size, (rule, shares) in best.items()}})
    text = [
        'Top-1 of the bases, not fine-tuned, and in brackets the share of the accuracy above chance that is left, in '
        'percent:', '', markdown(table), '',
        'Below are these shares, with every rule: mean ± standard deviation over seeds.', '']
    for base, lines in bases.items():
        text += [f'## {base}', '', markdown([
            {'model': model, 'rule': rule, **{f'{size} px': spread(list(line[size].values()), 1) for size in sizes}}
            for (model, rule), line in lines.items()]), '']
        table = []
        for model in dict.fromkeys(name for name, _ in lines):
            line = {'model, by its best rule': model}
            for size in sizes:
                rule, own = best_rule(lines, model, size)
                _, others = best_rule(lines, 'unchanged', size)
                pairs = [own[seed] - others[seed] for seed in own if seed in others]
                line[f'{size} px'] = f'{rule}: {difference(pairs, 1)}' if model != 'unchanged' else rule
            table.append(line)
        text += ['Minus the base fine-tuned unchanged, at the same seed, with 95 % intervals:', '', markdown(table), '']
    return '\n'.join(text)


def draw(rows, chance, own_size, path):
    """A panel for each base, not fine-tuned: what is left by each rule. Bands go from the worst to the best seed."""
    bases = kept_by(rows, chance, own_size)
    figure = new_figure(4.2 * len(bases), 4)
    rules = list(dict.fromkeys(
        rule.removesuffix('+log') for lines in bases.values() for model, rule in lines if model == 'not fine-tuned'))
    for axes, (base, lines) in zip(figure.subplots(1, len(bases), sharey=True, squeeze=False)[0], bases.items()):
        for (model, rule), sizes in lines.items():
            if model != 'not fine-tuned':
                continue
            x, shares = sorted(sizes), [list(sizes[size].values()) for size in sorted(sizes)]
            color, log = f'C{rules.index(rule.removesuffix("+log"))}', rule.endswith('+log')
            axes.fill_between(x, list(map(min, shares)), list(map(max, shares)), color=color, alpha=0.1, linewidth=0)
            axes.plot(
                x, list(map(mean, shares)), '--' if log else '-', color=color, marker='o', markersize=4, label=rule)
        axes.set_xticks(x)
        axes.set(title=base, xlabel='image size (px)')
        axes.grid(alpha=0.3)
        axes.legend(fontsize='small')
    figure.axes[0].set_ylabel('accuracy above chance that is left (%)')
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='folder of an experiment, with checkpoints')
    parser.add_argument('--data-dir', required=True, help='has train and test')
    parser.add_argument('--output', type=Path, required=True, help='folder; may be new')
    parser.add_argument('--bases', nargs='+', default=list(BASES), help='labels of models (default: %(default)s)')
    parser.add_argument('--seeds', nargs='+', type=int, help='(default: all)')
    parser.add_argument('--encodings', nargs='*', default=list(ENCODINGS), help='to graft (default: %(default)s)')
    parser.add_argument('--epochs', type=int, default=3, help='of fine-tuning')
    parser.add_argument('--lr', type=float, default=5e-4, help='of fine-tuning (default: %(default)s)')
    parser.add_argument('--sizes', type=int, nargs='+', default=[32, 48, 64, 96, 128], help='pixels, own size first')
    parser.add_argument('--num-images', type=int, default=1000, help='test images (default: %(default)s)')
    args = parser.parse_args()
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        trained = trained_models(args.runs, args.bases)
        seeds = sorted({run.seed for run in trained})
        trained = [run for run in trained if args.seeds is None or run.seed in args.seeds]
        if not trained:
            raise ValueError(f'{args.runs} has no run with these seeds; it has {", ".join(map(str, seeds))}.')
        chance = 100 / load_model(str(trained[0].checkpoint)).num_classes
        rows = measure(args, trained)
    except (ValueError, OSError) as e:
        parser.error(str(e))
    notes = (
        f'{args.epochs} epochs at {args.lr:g}, {args.num_images} test images; {about(torch.device("cpu"))}')
    write_csv(rows, args.output / 'retrofit.csv', notes)
    text = f'{show(rows, chance, args.sizes[0])}\n{notes}\n'
    (args.output / 'retrofit.md').write_text(f'# Rules and grafts for other sizes\n\n{text}')
    draw(rows, chance, args.sizes[0], args.output / 'retrofit.png')
    print(text)


if __name__ == '__main__':
    main()
