"""Can a trained model be taught other sizes? Rules for other sizes, and grafted encodings, beside each other.

    python examples/retrofit.py RUNS --data-dir DATA --output retrofit

RUNS is a folder of `timm-sape experiment` or of `examples/reference_table.py` with checkpoints; its models are the
bases. DATA has train/, held_out/ and test/. Each base is tested at several sizes. Then it is fine-tuned for a few
epochs at its own size: unchanged, and with each of several encodings added, behind a gate that starts at 0. These are
tested likewise. An encoding helps if the model keeps more than the one fine-tuned unchanged. The measure is the
accuracy above chance, in percent of that of the base at its own size on the same images, so what fine-tuning and the
encoding cost or gain at that size counts, too.

For each model and size, the rule is chosen on held_out/ from all that the model has, and only this one is tested on
test/. A base has up to 8 rules, and a graft with rules of its own doubles them: 'yarn+log, pape rescale' is YaRN with
scaled logits for the base, and PaPE rescaled; the other half leaves the graft at its default. So a model is tested at
most 16 times on held_out/ and once on test/ at each size, on fewer images above twice its own size.

The gate of each layer after fine-tuning is in the tables, so that a graft that does not help can be told from one that
was not learned. Where the class is read from the class token, that of the last layer cannot act.

LookHere is not grafted: it has no gate, as it masks logits, and it needs 4 heads where the bases of the reference plan
have 2. 'LookHere, 4 heads' of that plan can be a base, with 'APE, 4 heads' beside it.

The command continues where it stopped: each model that was tested is a line of OUTPUT/retrofit.jsonl. Several processes
may work on one folder, for instance one per core. After each model the tables are written to retrofit.md, a row for
each test to retrofit.csv, and the bases with all rules, on held_out/, to retrofit.png.
"""
import argparse
import json
import os
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

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
from timm_sape.analysis.maps import logits_of, record_calls, watched_module
from timm_sape.lab.evaluate import predict, top_k_correct
from timm_sape.lab.experiment import (
    alone,
    check_splits,
    hash_of,
    images_in,
    lock,
    refuse_other_images,
    shape_of,
    trained_models,
    write_text,
)
from timm_sape.lab.intervals import corrected_cells, spread
from timm_sape.lab.machine import about
from timm_sape.lab.rules import rules_of
from timm_sape.lab.sweep import check_sizes
from timm_sape.lab.tables import markdown, write_csv
from timm_sape.loading import load_images, load_model, number_classes, open_dataset, preprocessing
from timm_sape.vit_pos_enc import VisionTransformerPosEnc

BASES = ('APE', 'sincos2d', 'RoPE-2D', 'RoPE-2D mixed')
AGAINST = 'RoPE-2D'
ENCODINGS = ('fire', 'cpb', 'pape', 'sape2_k')
ALONE, UNCHANGED = 'not fine-tuned', 'unchanged'
SPLITS = ('train', 'held_out', 'test')
BATCH = 32
SHOWN = 'A difference is shown if both intervals, corrected for all rows of the table, exclude 0.'


def open_split(data_dir, split, checkpoint):
    """The images of a split, with the classes numbered as in the training of a checkpoint."""
    data = open_dataset(data_dir, split=split)
    number_classes(data, [str(checkpoint)])
    return data


@lru_cache(maxsize=1)  # the models of a base follow each other
def train_images(data_dir, checkpoint):
    """All images to train with, `[n, 3, height, width]`, as the model of a checkpoint gets them, and labels, `[n]`."""
    data = open_split(data_dir, 'train', checkpoint)
    data.transform = preprocessing(load_model(str(checkpoint)))
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
        **config.get('model_kwargs', {}),
        'pos_enc': f'{base.pos_enc}+auto_{name}',
        'pos_enc_kwargs': {**base.pos_enc_kwargs, f'auto_{name}': start},
    }
    overlay = {key: base.pretrained_cfg[key] for key in ('mean', 'std', 'crop_pct', 'interpolation')}
    family = '_'.join(config['model'].split('_')[:2])  # vit_tiny, test_vit, ...
    model = timm.create_model(
        f'{family}_pos_enc', num_classes=base.num_classes, global_pool=base.global_pool,
        pretrained_cfg_overlay=overlay, **kwargs)
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(f'auto_{name}' in key for key in missing), (missing, unexpected)
    return model


def choices(checkpoint, model, encoding=None):
    """The arguments of `load_model` that choose each rule of a base, and each of the grafted encoding's beside it."""
    grafted = timm_sape.get_encoding(encoding).rules if encoding else ()
    found = {}
    for rule, kwargs in rules_of(load_model(str(checkpoint))).items():
        for beside in dict.fromkeys((*grafted[:1], *({'rescale'} & set(grafted)))) or ('',):
            given = {**model.pos_enc_kwargs, **kwargs.get('pos_enc_kwargs', {})}
            if beside:
                given[f'auto_{encoding}'] = {**given[f'auto_{encoding}'], 'resolution': beside}
            found[f'{rule}, {encoding} {beside}' if beside else rule] = {**kwargs, 'pos_enc_kwargs': given}
    return found


@torch.no_grad()
def contributions(model, encoding, images):
    """What a grafted encoding has become: for each layer its gate, and the standard deviation of what it adds to the
    logits of a patch, over the patches that this one sees. None where a layer has no gate."""
    found = []
    layers = [block.attn for block in model.blocks]
    with record_calls(list(map(watched_module, layers))) as calls:
        model(images)
    for layer in layers:
        args, kwargs = calls[watched_module(layer)]
        gate = next((part for name, part in layer.named_modules() if name.endswith(f'auto_{encoding}.gate')), None)
        if gate is None:
            found.append({'gate': None, 'spread': None})
            continue
        trained, patches = gate.weight.clone(), slice(model.num_prefix_tokens, None)
        with_it = logits_of(layer, args, kwargs)[1]
        gate.weight.zero_()
        added = (with_it - logits_of(layer, args, kwargs)[1])[..., patches, patches]
        gate.weight.copy_(trained)
        found.append({'gate': 100 * trained.item(), 'spread': added.std(dim=-1).mean().item()})
    return found


def sweep_rules(spec, checkpoint, rules, args, own_size):
    """Test a model with all rules on held_out/, and with the best one of each size on test/.

    The checkpoint is the base's, which knows how classes are numbered. All sizes draw their images in the same order,
    so that `own_top1` is the accuracy at the own size on the same ones.
    """
    rows, right = [], {}
    for size in sorted(set(args.sizes), key=lambda size: (size != own_size, size)):
        tried = list(rules)[:1] if size == own_size else list(rules)  # there no rule changes anything
        fewer = min(1, (2 * own_size / size) ** 2)  # above twice the size, every size takes about as long
        for split, number in (('held_out', args.choose_images), ('test', args.num_images)):
            data = open_split(args.data_dir, split, checkpoint)
            data.transform = preprocessing(load_model(spec), (size, size), crop_mode='squash')
            batches = list(load_images(data, 100, max(1, round(number * fewer)), shuffle=True))
            top1 = {}
            for rule in tried:
                found = predict(load_model(spec, img_size=size, **rules[rule]), batches)
                hits = top_k_correct(found.logits, found.labels).double()
                right.setdefault(split, hits)
                top1[rule] = 100 * hits.mean().item()
                rows.append({
                    'size': size,
                    'split': split,
                    'rule': rule,
                    'num_images': len(hits),
                    'top1': round(top1[rule], 3),
                    'own_top1': round(100 * right[split][:len(hits)].mean().item(), 3),
                })
            tried = [max(top1, key=top1.get)]
    return rows


def measure(run, name, args, own_size):
    """Make one model of a base and test it. Returns what the tables need of it."""
    if name == ALONE:
        model = load_model(str(run.checkpoint))
        return {'layers': None, 'rows': sweep_rules(
            str(run.checkpoint), run.checkpoint, choices(run.checkpoint, model), args, own_size)}
    encoding = None if name == UNCHANGED else name
    images, labels = train_images(args.data_dir, run.checkpoint)
    random_seed(run.seed)
    model = add_encoding(run.checkpoint, encoding) if encoding else load_model(str(run.checkpoint))
    random_seed(run.seed)  # the same batches for all
    fine_tune(model, images, labels, args.epochs, args.lr, f'{run.label}, seed {run.seed}, {name}')
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, 'model')
        timm_sape.hub.save(model, folder)
        return {
            'layers': contributions(model, encoding, images[::-(-len(images) // 100)]) if encoding else None,
            'rows': sweep_rules(
                f'local-dir:{folder}', run.checkpoint, choices(run.checkpoint, model, encoding), args, own_size),
        }


def settings_of(args, trained):
    """All that the lines of a folder must agree in."""
    check_splits(SPLITS, Path(args.data_dir))
    images = images_in(SPLITS, Path(args.data_dir))
    refuse_other_images(images, args.runs)  # held_out/ would not be held out
    if min(args.epochs, args.num_images, args.choose_images) < 1:
        raise ValueError('--epochs, --num-images and --choose-images must be 1 or more.')
    for name in args.encodings:
        timm_sape.get_encoding(f'auto_{name}')  # refuses what has no gate
    for run in trained:
        model = load_model(str(run.checkpoint))
        if not isinstance(model, VisionTransformerPosEnc):
            raise ValueError(f'{run.label} is a {type(model).__name__}. The bases must be vit_* models of timm_sape.')
        check_sizes(run.label, [(size, size) for size in args.sizes], model.patch_embed.patch_size)
    height, width, classes = shape_of(trained)
    if height != width:
        raise ValueError(f'The bases must be of a square size, not {height}x{width}.')
    if height not in args.sizes:
        raise ValueError(f'--sizes must contain {height}, the size that the bases were trained at.')
    if len(open_dataset(args.data_dir, split='train')) < BATCH:
        raise ValueError(f'{args.data_dir} needs at least {BATCH} images in train/, one batch.')
    return {
        'images': images, 'own_size': height, 'classes': classes, 'sizes': sorted(set(args.sizes)),
        'num_images': args.num_images, 'choose_images': args.choose_images, 'epochs': args.epochs, 'lr': args.lr}


def read_lines(path):
    """The models that were tested. A last line that was cut off is left out, so its model is tested again."""
    text = path.read_text() if path.exists() else ''
    try:
        return list(map(json.loads, text[:text.rfind('\n') + 1].splitlines()))
    except ValueError as e:
        raise ValueError(f'{path} has a damaged line ({e}); remove it, and its model is tested again') from e


def refuse_begun_otherwise(lines, settings, weights, output):
    """Raise ValueError if a line was measured with other settings, images or weights."""
    for line in lines:
        key = line['base'], line['seed']
        for what, old, new in (
                *((what, line['settings'].get(what), value) for what, value in settings.items()),
                ('weights', line['weights'], weights.get(key, line['weights']))):
            if old != new:
                raise ValueError(
                    f'{output} was begun otherwise: {key[0]}, seed {key[1]}, {line["model"]} has {what} {old}, now it '
                    f'is {new}. Use the former, or name another --output.')


def work(args, trained, seeds, settings, weights):
    """Train and test what is missing; write all files after each model."""
    path = args.output / 'retrofit.jsonl'
    waiting = [
        *((run, ALONE) for run in trained),
        *((run, name) for run in trained if run.seed in seeds for name in (UNCHANGED, *args.encodings))]

    def update(new=()):
        with alone(path):
            lines = [*read_lines(path), *new]
            refuse_begun_otherwise(lines, settings, weights, args.output)
            write_text(path, ''.join(json.dumps(line) + '\n' for line in lines))
            if lines:
                write_tables(lines, settings, args)

    update()
    told = False
    while waiting:
        for run, name in list(waiting):
            held = lock(args.output / '.locks' / f'{run.checkpoint.parents[1].name}-seed{run.seed}-{name}')
            if held is None:
                continue
            try:
                done = {(line['base'], line['seed'], line['model']) for line in read_lines(path)}
                if (run.label, run.seed, name) not in done:
                    update([{
                        'base': run.label, 'seed': run.seed, 'model': name, 'settings': settings,
                        'weights': weights[run.label, run.seed], 'measured_on': about(torch.device('cpu')),
                        **measure(run, name, args, settings['own_size']),
                    }])
                    print(f'{run.label}, seed {run.seed}, {name}: done', file=sys.stderr, flush=True)
            finally:
                os.close(held)
            waiting.remove((run, name))
        if waiting:
            if not told:
                told = True
                print('waiting for another start of this command', file=sys.stderr, flush=True)
            time.sleep(1)


def rows_of(lines, chance):
    """A row for each test, with the accuracy above chance that is left, in percent, where the base has any."""
    own = {
        (line['base'], line['seed'], row['split'], row['size']): row['own_top1'] - chance
        for line in lines if line['model'] == ALONE for row in line['rows']}
    rows = []
    for line in lines:
        for row in line['rows']:
            above = own.get((line['base'], line['seed'], row['split'], row['size']), 0)
            kept = round(100 * (row['top1'] - chance) / above, 3) if above > 0 else None
            rows.append({**{key: line[key] for key in ('base', 'seed', 'model')}, **row, 'kept': kept})
    return rows


def by_seed(rows, column, **where):
    return {
        row['seed']: row[column] for row in rows
        if row[column] is not None and all(row[key] == value for key, value in where.items())}


def counted(rules):
    """Names of rules; of several with the number of seeds that chose each."""
    counts = Counter(rules)
    return '; '.join(counts) if len(counts) == 1 else '; '.join(f'{rule} {n}' for rule, n in counts.most_common())


def compare(column, names, against, sizes, find):
    """Rows of a table of differences at each size. `find` gives a column by seed, of a size and name."""
    others = [name for name in names if name != against]
    table = []
    for name in others:
        for size in sizes:
            values, values_against = find(column, size, name), find(column, size, against)
            rules, rules_against = find('rule', size, name), find('rule', size, against)
            both = sorted(values.keys() & values_against.keys())
            table.append({
                'model': name, 'size': f'{size} px', 'seeds': len(both), 'rule': counted(rules[seed] for seed in both),
                f'rule of {against}': counted(rules_against[seed] for seed in both),
                **corrected_cells(values, values_against, len(others) * len(sizes)),
            })
    return table


def show(lines, rows, settings, args):
    """Tables for people: the bases, then for each base all rules, the grafts, and what these have learned."""
    own_size, sizes = settings['own_size'], settings['sizes']
    bases = list(dict.fromkeys([*args.bases, *(line['base'] for line in lines)]))

    def on_test(column, size, base, model=ALONE):
        return by_seed(rows, column, split='test', size=size, base=base, model=model)

    def cell(base, size):
        top1, kept = (spread(list(on_test(column, size, base).values()), 1) for column in ('top1', 'kept'))
        return f'{top1} ({kept or "no base above chance"}) {counted(on_test("rule", size, base).values())}'

    text = [
        'Top-1 of the bases, not fine-tuned, on test images; in brackets the share of the accuracy above chance that '
        'is left, in percent; and the rule, chosen on held-out images for each seed.', '',
        markdown([{'base': base, **{
            f'{size} px': cell(base, size) if on_test('top1', size, base) else '' for size in sizes}}
            for base in bases]), '']
    if AGAINST in bases and len(bases) > 1:
        text += [
            f'Top-1 of the bases minus that of {AGAINST} at the same seed, each by its rule. {SHOWN}', '',
            markdown(compare('top1', bases, AGAINST, sizes, on_test)), '']
    text += ['Below is the accuracy above chance that is left, in percent of that of the base at its own size.', '']
    for base in bases:
        planned = args.encodings if base in args.bases else ()
        names = list(dict.fromkeys(
            [ALONE, UNCHANGED, *planned, *(line['model'] for line in lines if line['base'] == base)]))
        text += [f'## {base}', '', 'Every rule, on the held-out images that the rule is chosen on:', '']
        rules = list(dict.fromkeys(
            (row['model'], row['rule']) for row in rows if row['base'] == base and row['size'] != own_size))
        text += [markdown([{'model': model, 'rule': rule, **{f'{size} px': spread(list(by_seed(
            rows, 'kept', split='held_out', base=base, model=model, size=size,
            **({} if size == own_size else {'rule': rule})).values()), 1) for size in sizes}}
            for model, rule in rules or [('', '')]]), '']
        if any(line['base'] == base and line['model'] == UNCHANGED for line in lines):
            text += [
                f'On test images, minus the base fine-tuned unchanged, at the same seed, each by its rule. {SHOWN}', '',
                markdown(compare(
                    'kept', names, UNCHANGED, sizes, lambda column, size, name: on_test(column, size, base, name))), '']
        learned = [line for line in lines if line['base'] == base and line['layers']]
        if learned:
            depth = len(learned[0]['layers'])
            text += [
                'Gates after fine-tuning, and in brackets the standard deviation of what the encoding adds to the '
                'logits of a patch. Where the class is read from the class token, the gate of the last layer cannot '
                'act: these encodings have no bias in the row of that token, and no other row is read.', '',
                markdown([{'encoding': name, **{f'layer {i}': '{} ({})'.format(*(
                    spread([line['layers'][i][key] for line in learned if line['model'] == name]) or 'none'
                    for key in ('gate', 'spread'))) for i in range(depth)}}
                    for name in names if any(line['model'] == name for line in learned)]), '']
    return '\n'.join(text)


def draw(rows, own_size, path):
    """A panel for each base, not fine-tuned: what is left by each rule. Bands go from the worst to the best seed."""
    rows = [row for row in rows if row['model'] == ALONE and row['split'] == 'held_out' and row['kept'] is not None]
    bases = list(dict.fromkeys(row['base'] for row in rows))
    # images are square, so slopes are rescaled alike
    rules = list(dict.fromkeys(row['rule'] for row in rows if row['size'] != own_size and 'slopes' not in row['rule']))
    colors = list(dict.fromkeys(rule.removesuffix('+log') for rule in rules))
    sizes = sorted({row['size'] for row in rows})
    columns = max(1, min(4, len(bases)))
    height = max(1, -(-len(bases) // columns))
    figure = new_figure(4.2 * columns, 3.8 * height + 0.8)
    drawn = {}  # one legend for all panels
    panels = figure.subplots(height, columns, sharey=True, squeeze=False).flatten()
    for axes in panels[len(bases):]:
        axes.set_axis_off()
    for axes, base in zip(panels, bases):
        for rule in rules:
            shares = [list(by_seed(
                rows, 'kept', base=base, size=size, **({} if size == own_size else {'rule': rule})).values())
                for size in sizes]
            if not all(shares):
                continue
            color, log = f'C{colors.index(rule.removesuffix("+log"))}', rule.endswith('+log')
            axes.fill_between(
                sizes, list(map(min, shares)), list(map(max, shares)), color=color, alpha=0.1, linewidth=0)
            drawn[rule], = axes.plot(
                sizes, list(map(mean, shares)), '--' if log else '-', color=color, marker='o', markersize=4)
        axes.set_xticks(sizes)
        axes.set(title=base, xlabel='image size (px)')
        axes.grid(alpha=0.3)
    figure.legend(
        list(drawn.values()), list(drawn), loc='outside lower center', ncols=3 * columns, fontsize='small')
    for axes in panels[::columns]:
        axes.set_ylabel('accuracy above chance that is left (%)')
    figure.savefig(path, dpi=120)


def write_tables(lines, settings, args):
    numbers = {
        split: ', '.join(f'{n} at {size} px' for n, size in dict.fromkeys(
            (row['num_images'], row['size']) for row in lines[0]['rows'] if row['split'] == split))
        for split in SPLITS[1:]}
    machines = '; '.join(dict.fromkeys(line['measured_on'] for line in lines))
    notes = (
        f'{settings["epochs"]} epochs at {settings["lr"]:g}; images of held_out/: {numbers["held_out"]}; of test/: '
        f'{numbers["test"]}; {machines}')
    rows = rows_of(lines, 100 / settings['classes'])
    write_csv(rows, args.output / 'retrofit.csv', notes)
    write_text(
        args.output / 'retrofit.md',
        f'# Rules and grafts for other sizes\n\n{show(lines, rows, settings, args)}\n{notes}\n')
    draw(rows, settings['own_size'], args.output / 'retrofit.png')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('runs', type=Path, help='folder of an experiment, with checkpoints')
    parser.add_argument('--data-dir', required=True, help='has train, held_out and test')
    parser.add_argument('--output', type=Path, required=True, help='folder; may be new')
    parser.add_argument('--bases', nargs='+', default=list(BASES), help='labels of models (default: %(default)s)')
    parser.add_argument(
        '--seeds', nargs='*', type=int,
        help='seeds to fine-tune; none to test the bases only, which are tested with all in any case (default: all)')
    parser.add_argument('--encodings', nargs='*', default=list(ENCODINGS), help='to graft (default: %(default)s)')
    parser.add_argument('--epochs', type=int, default=3, help='of fine-tuning')
    parser.add_argument('--lr', type=float, default=5e-4, help='of fine-tuning (default: %(default)s)')
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[32, 48, 64, 96, 128], help='pixels, own size among them')
    parser.add_argument(
        '--choose-images', type=int, default=500, help='held-out images that choose a rule (default: %(default)s)')
    parser.add_argument('--num-images', type=int, default=4000, help='test images (default: %(default)s)')
    args = parser.parse_args()
    try:
        trained = trained_models(args.runs, args.bases)
        there = sorted({run.seed for run in trained})
        seeds = there if args.seeds is None else args.seeds
        if not set(seeds) <= set(there):
            raise ValueError(f'{args.runs} has no run with all of these seeds; it has {", ".join(map(str, there))}.')
        settings = settings_of(args, trained)
        args.output.mkdir(parents=True, exist_ok=True)
        work(args, trained, seeds, settings, {(run.label, run.seed): hash_of(run.checkpoint) for run in trained})
    except (ValueError, OSError) as e:
        parser.error(str(e))
    print((args.output / 'retrofit.md').read_text())


if __name__ == '__main__':
    main()
