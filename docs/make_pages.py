"""Write what is generated in the documents: a page for each encoding, and the tables between `begin` and `end` marks.

    python docs/make_pages.py              write the pages and the tables
    python docs/make_pages.py --pictures   draw the gallery and the picture of each encoding again, too

Descriptions come from docstrings, figures from results/*.csv. tests/test_docs.py checks that all of it is up to date.
"""
import argparse
import csv
import inspect
import json
import math
import re
import textwrap
from collections import Counter
from pathlib import Path
from statistics import mean

import timm

import timm_sape
from timm_sape.encodings.registry import encoding_title
from timm_sape.lab.bench import cost_table
from timm_sape.lab.intervals import corrected_cells, difference, spread, unpaired_interval

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / 'docs', ROOT / 'results'

# Where the docstring of the class does not have it in a line.
EQUATIONS = {
    'ape': 'x_i + e[i], with a learned vector e[i] for each token i.',
    'irpe_k': 'Logits get (q_i / sqrt(d)) . r_k[I(i, j)], where I(i, j) is the bucket of the offset p_i - p_j.',
    'irpe_q': 'Logits get (k_j / sqrt(d)) . r_q[I(j, i)], where I(j, i) is the bucket of the offset p_j - p_i.',
    'irpe_qk': 'Logits get (q_i / sqrt(d)) . r_k[I(i, j)] + (k_j / sqrt(d)) . r_q[I(j, i)], where I(i, j) is the '
               'bucket of the offset p_i - p_j.',
    'irpe_qkv': 'As irpe_qk, and the output gets sum_j attn_ij r_v[I(i, j)].',
    'nope': 'x_i, unchanged.',
    'sape2': 'Along the row of patch i: p_im = sum over j >= m of sigmoid(q_i.k_j / sqrt(d)), and the code c_i has the '
             'entry e[p_im].{vector} for each column m. Logits get |c_i - c_n| along rows, plus the same along '
             'columns.',
    'sape2sq': 'Logits get |c_i - c_n|^2, summed over both axes, where c are the codes of SaPE2, made with {vector}.',
}
VECTORS = {'q': 'q_i', 'k': 'k_i', 'qk': 'q_i, and another one with k_i,'}

ON_NAFLEX = {
    'tokens': 'Each image gets the vectors of its own grid.',
    'tokens after a block': 'Each image is convolved on its own grid.',
    'tokens in each layer': 'Each image gets the vectors of its own grid, in each layer.',
    'q and k': "One rotation for the whole batch, with the angles of each image's own grid. Attention stays fused.",
    'logits, by geometry': 'Each image gets the bias of its own grid. Images of one grid are computed together.',
    'logits, from content': 'Each image gets the bias of its own grid. Images of one grid are computed together.',
    'logits, from content, as channels of q and k':
        'Each image gets the channels of its own grid. Images of one grid are computed together.',
    'values': 'The term for values is computed for each image on its own grid.',
}
NAFLEX_EXTRA = {
    'ape': "The table is resized for each image as timm's NaFlexVit does it.",
    **dict.fromkeys(
        ('comrope', 'liere'),
        'Images of one grid are turned together, by the matrices of their own grid. Attention stays fused.'),
    'nope': 'Nothing to do.',
    'ope': 'Objects are found in the patches of an image where none is missing; otherwise give '
           '`object_index=`, `[B, K]`.',
    'pemix': 'The same weights for all images.',
    'pope': 'Images of one grid are turned together. Attention stays fused.',
}
RULES = {
    'extrapolate': 'New patches get new positions. The default.',
    'rescale': 'Positions are squeezed or stretched to the trained grid '
               '([position interpolation](https://arxiv.org/abs/2306.15595)).',
    'ntk': 'Slow pairs of channels are rescaled, fast ones hardly: the base of the frequencies changes (NTK-aware, '
           '[described here](https://arxiv.org/abs/2309.00071)).',
    'yarn': 'Pairs that turn fewer than `ramp[0]` times from edge to edge of the trained grid are rescaled, those that '
            'turn more than `ramp[1]` times extrapolate. At s times the length, q.k is multiplied by (0.1 ln s + 1)^2 '
            '([YaRN](https://arxiv.org/abs/2309.00071)).',
    'slopes': 'Slopes are multiplied by sqrt(N0 / N) for N patches; at the trained aspect ratio the same as `rescale` '
              '([Al-Khateeb et al.](https://arxiv.org/abs/2310.13017)).',
}
MODELS = {  # rows of plan.csv in results/cpu_cifar10; three of them have six seeds in pairs.csv
    'ape': ['APE'], 'cope': ['CoPE+APE'], 'nope': ['none'], 'rope2d': ['RoPE-2D'], 'rope2d_mixed': ['RoPE-2D mixed'],
    'rpb': ['relative bias'], 'sape2_k': ['SaPE2(K)+APE', 'SaPE2(K)'], 'sape2_q': ['SaPE2(Q)+APE'], 'shaw': ['Shaw'],
}
VARIANTS = {  # rows of ablations.csv
    'sape2_q': ['SaPE2(Q)'], 'sape2_qk': ['SaPE2(QK)+APE', 'SaPE2(QK)'],
    'sape2sq_k': ['K+APE, squared distance', 'K, squared distance'],
}


def read_csv(path):
    with open(path, newline='', encoding='utf-8') as f:
        return list(csv.DictReader(f))


def table(head, rows):
    lines = [head, ['---'] * len(head), *rows]
    return '\n'.join(f'| {" | ".join(map(str, line))} |' for line in lines)


def table_of(head, rows):
    """A table of rows that are given as a name and its cells by column."""
    columns = list(dict.fromkeys(column for _, cells in rows for column in cells))
    return table([head, *columns], [[name, *(cells.get(column, '') for column in columns)] for name, cells in rows])


def rows_of_table(text):
    """The rows of a Markdown table, each by its head."""
    head, _, *rows = ([cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines())
    return [dict(zip(head, row)) for row in rows]


def values_of(rows, model):
    """Top-1 of a model's runs by their seed."""
    return {row['seed']: float(row['top1']) for row in rows if row['model'] == model}


def beside(values, base, digits=2):
    """Mean ± standard deviation, and the difference from the runs of another model with both 95 % intervals."""
    if values == base:
        return [spread(list(values.values())), '', '']
    base = {seed: base[seed] for seed in values}
    low, high = unpaired_interval(list(values.values()), list(base.values()))
    ends = f'[{low:+.{digits}f}, {high:+.{digits}f}]'
    return [spread(list(values.values())), difference(subtract(values, base), digits), ends]


# tables, by the name of their mark


def results():
    rows = read_csv(RESULTS / 'cpu_cifar10' / 'pairs.csv')
    found = []
    for model in ('APE', 'SaPE2(K)+APE', 'RoPE-2D'):
        cells = [f'`{model}`' if model == 'none' else model]
        for end in ('', ', rate .00075'):
            values, base = (values_of(rows, f'{name}{end}') for name in (model, 'APE'))
            cells += beside(values, base)[:2]
        found.append(cells)
    seeds = len(values)
    head = ['model', 'top-1 (%)', 'difference from APE', 'at half the learning rate (%)', 'difference from APE']
    return (
        f'A model of width 64 and depth 4, ten epochs of 10,000 images of CIFAR-10, {seeds} seeds. The intervals are '
        f'95 %\nconfidence intervals of the seed-by-seed differences:\n\n{table(head, found)}')


def choosing():
    """A row for each reader, then what the advice rests on, a comparison a row."""
    six, five, of_lape = (
        read_csv(RESULTS / 'cpu_cifar10' / name) for name in ('pairs.csv', 'reference/reference.csv', 'lape.csv'))
    assert {row['lr'] for row in five if row['model'] in ('APE', 'RoPE-2D', 'SaPE2(K)+APE')} == {'0.0015'}
    eleven = six + five  # of these three models all have the recipe's learning rate
    three, four = (read_csv(RESULTS / 'cpu_long' / f'long{end}.csv') for end in ('', '_seeds'))
    at_64 = {name: kept(name, '64') for name in ('APE', 'RoPE-2D', 'RoPE-2D mixed')}
    others = {row['base'] for row in read_csv(RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.csv')} - {'APE'}
    two_heads = {row['model'] for row in five if not row['model'].endswith('4 heads')}
    means = {name: mean(values_of(five, name).values()) for name in two_heads}
    assert max(means, key=means.get) == 'LaPE'
    rows = [
        ['top-1 after ten epochs', '`rope2d`, `ape`', *comparison(eleven, 'RoPE-2D', 'APE')],
        ['', '`rope2d`, `ape`; four heads', *comparison(five, 'RoPE-2D, 4 heads', 'APE, 4 heads')],
        ['', '`lape`, `rope2d`', *comparison(of_lape, 'LaPE', 'RoPE-2D')],
        ['', '`lape`, `rope2d`; four heads', *comparison(of_lape, 'LaPE, 4 heads', 'RoPE-2D, 4 heads')],
        ['', '`ape+sape2_k`, `ape`', *comparison(eleven, 'SaPE2(K)+APE', 'APE')],
        ['', '`ape+sape2_k`, `ape`; half the learning rate',
         *comparison(six, 'SaPE2(K)+APE, rate .00075', 'APE, rate .00075')],
        ['top-1 after 40 epochs', '`rope2d`, `ape`; four heads',
         *comparison(three + four, 'RoPE-2D, 4 heads', 'APE, 4 heads')],
        ['', '`lape`, `ape`; four heads', *comparison(long_lape(), 'LaPE, 4 heads', 'APE, 4 heads')],
        ['', '`lape`, `rope2d`; four heads', *comparison(long_lape(), 'LaPE, 4 heads', 'RoPE-2D, 4 heads')],
        ['accuracy kept at twice the size', '`rope2d`, `ape`', *difference_cells(at_64['RoPE-2D'], at_64['APE'], 1)],
        ['', '`rope2d_mixed`, `ape`', *difference_cells(at_64['RoPE-2D mixed'], at_64['APE'], 1)],
        ['top-1 after fine-tuning', '`rope2d` grafted, nothing grafted',
         *comparison(grafted('cpu') + grafted('confirm'), 'rope2d', 'none')],
        ['', 'the same; eight of the seeds, new', *comparison(grafted('confirm'), 'rope2d', 'none')],
        *dense(),
    ]
    corrected = [corrected_cells(at_64[name], at_64['APE'], len(others))['shown'] for name in list(at_64)[1:]]
    assert corrected == ['no', 'yes']
    advice = [
        ['train a small model from scratch', '`rope2d` or `lape`',
         'after ten epochs `rope2d` is ahead of `ape`; after 40, `lape` is, and `rope2d` is not shown to be. `lape` '
         'has the highest mean of the models with two heads, `rope2d` has more rules for other sizes'],
        ['test at twice the trained size',
         '`rope2d` or `rope2d_mixed`, with a [rule](resolutions.md#rules) chosen on held-out images '
         '(`timm-sape adapt`)',
         'they keep more of their accuracy than `ape`'],
        ['start from a pretrained backbone', "the backbone's own encoding; or try a graft of `rope2d`",
         '`rope2d` gained a little in a [small test](grafting.md#fine-tune), but the new seeds alone do not show it; '
         'no gain from `sape2_k` or `rpb` is shown'],
        ['segment by maps of features', '`ape`', '`rope2d` and `rope2d_mixed` are behind it'],
        ['study SaPE2', '`ape+sape2_k`, at half the learning rate of `ape`',
         'at the same rate it is behind `ape`. It is not shown to improve `ape` at either'],
        ['add no cost', '`ape`, `sincos2d`', 'a training step takes as long as without position ([cost](cost.md))'],
    ]
    return table(['you want to', 'take', 'because'], advice) + '\n\n' + textwrap.fill(
        'This is what the advice rests on. A difference is the first model minus the second, in percentage points, '
        'with the 95 % interval that pairs runs of one seed; `not paired` treats all runs as independent. '
        '**A difference is shown if both intervals exclude 0.**', 120) + '\n\n' + table(
        ['measured', 'compared', 'difference', 'not paired', 'seeds', 'shown'], rows) + '\n\n' + textwrap.fill(
        'Accuracy kept: accuracy above chance (10 %) at the other size, in percent of that at the trained size, '
        f'with a rule chosen for each seed on held-out images. If the intervals are corrected for the {len(others)} '
        'models that were compared with `ape`, it is [shown](../results/details.md#how-much-accuracy-is-kept-at-two-to-'
        'four-times-the-trained-size) for `rope2d_mixed` alone. Corrected for two comparisons, the lead of `lape` '
        'after 40 epochs is [not shown](../results/README.md#does-the-order-hold-in-a-longer-training); three of its '
        'seeds were added after a look at the others. The rules, and how many seeds chose each: `rope2d` '
        f'{rules_at("RoPE-2D", "64")}; `rope2d_mixed` {rules_at("RoPE-2D mixed", "64")}. Maps: mean intersection over '
        'union of a linear map on frozen features, at the trained size, with intervals corrected for all models and '
        'sizes; at twice that size no difference is shown.', 120, break_long_words=False, break_on_hyphens=False)


def comparison(rows, model, base):
    """Cells of a comparison of two models' top-1: with pairs, not paired, seeds, shown."""
    return difference_cells(values_of(rows, model), values_of(rows, base))


def difference_cells(values, base, digits=2):
    return [*beside(values, base, digits)[1:], len(values), corrected_cells(values, base, 1)['shown']]


def dense():
    """Rows for segmentation by models at their own size. At twice that size no difference is shown."""
    text = (RESULTS / 'cpu_cifar10' / 'reference' / 'segmentation.md').read_text(encoding='utf-8')
    found = rows_of_table(text.split('\n\n')[1])
    assert 'yes' not in {row['shown'] for row in found if row['size'] == '64 px'}
    cells = {
        row['model']: [f'{row["difference"]} {row["corrected, pairs"]}', row['corrected, not paired'], row['seeds'],
                       row['shown']]
        for row in found if row['size'] == '32 px'}
    names = {'RoPE-2D': 'rope2d', 'RoPE-2D mixed': 'rope2d_mixed', 'none': 'nope', 'SaPE2(K)+APE': 'ape+sape2_k',
             'sincos2d': 'sincos2d'}
    return [
        ['' if i else 'segmentation by maps', f'`{name}`, `ape`', *cells[model]]
        for i, (model, name) in enumerate(names.items())]


def tested_at(model, size):
    """Rows of the tests of a trained model at a size, each by the rule that held-out images chose."""
    return [
        row for row in read_csv(RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.csv')
        if (row['base'], row['model'], row['split'], row['size']) == (model, 'not fine-tuned', 'test', size)]


def kept(model, size):
    """Accuracy above chance at a size in percent of that at the trained size, by seed."""
    return {row['seed']: float(row['kept']) for row in tested_at(model, size)}


def rules_at(model, size):
    """The rules that were chosen, and for how many seeds each."""
    counts = Counter(row['rule'] for row in tested_at(model, size))
    return ', '.join(f'`{rule}` {n}' for rule, n in counts.most_common())


def subtract(values, others):
    return [values[seed] - others[seed] for seed in values]


def reference_table():
    """What is above the table of examples/reference_table.py, its rows, and the note below it."""
    path = RESULTS / 'cpu_cifar10' / 'reference' / 'reference.md'
    *_, above, text, notes = path.read_text(encoding='utf-8').split('\n\n')
    return above, rows_of_table(text), notes


def reference():
    """Of the table of examples/reference_table.py the columns that fit on a page, and how far it is."""
    above, rows, notes = reference_table()
    folder, found = RESULTS / 'cpu_cifar10' / 'reference', []
    hardware = {row['model']: row['hardware'] for row in read_csv(folder / 'reference.csv')}
    twice = {json.loads(line)['label'] for line in (folder / 'first_trainings.jsonl').read_text().splitlines()}
    for row in rows:
        model, pos_enc = row['model'], row['pos_enc'].strip('`')
        page = pos_enc if pos_enc in timm_sape.list_encodings() else None
        trained, planned = row['seeds'].split(' of ')
        found.append([
            (f'[{model}](encodings/{page}.md)' if page else model) +
            (f' ({row["seeds"]} seeds)' if trained != planned else '') +
            (' **' if model in twice else ' *' if hardware[model].startswith('Intel') else ''),
            row['learning rate'].lstrip('0'), row['top-1 (%)'], row['minus'], row['difference'],
            row['corrected, pairs'], row['corrected, not paired'],
            row['48 px, best rule (%)'], row['64 px, best rule (%)'], row['P-SHAP'], row['step, ViT-S']])
    columns = [
        'model', 'rate', 'top-1 (%)', 'minus', 'difference', 'pairs', 'not paired', '48 px', '64 px', 'P-SHAP',
        'step']
    notes = re.sub(', those of Dunnett [^.]*', '', notes.strip())  # whose column is not here, as that of memory
    notes = notes.replace('Step and memory, at', 'Step, at').replace('; empty: not measured there', '')
    return f'{above}\n\n{table(columns, found)}\n\n{notes}'


def longer():
    """Each run of the longer training; once all seeds are trained, the difference from APE with as many heads."""
    rows = read_csv(RESULTS / 'cpu_long' / 'long.csv')
    seeds, runs = sorted({row['seed'] for row in rows}), {}
    for row in rows:
        runs.setdefault(row['model'], {}).update({row['seed']: float(row['top1'])} if row['top1'] else {})
    found = []
    for model, values in runs.items():
        base = runs['APE, 4 heads' if model.endswith(', 4 heads') else 'APE']
        is_complete = len(values) == len(base) == len(seeds)
        cells = [f'{values[seed]:.2f}' if seed in values else '' for seed in seeds]
        found.append([model, *cells, *(beside(values, base) if is_complete else [''] * 3)])
    return table(
        ['model', *(f'seed {seed}' for seed in seeds), 'mean', 'minus APE with as many heads', 'not paired'], found)


def longer_seeds():
    """APE and RoPE-2D with four heads after the longer training, by seed, and over all seeds once they are trained."""
    first, second = (read_csv(RESULTS / 'cpu_long' / f'{plan}.csv') for plan in ('long', 'long_seeds'))
    runs = [row for row in first + second if row['top1']]
    ape, rope = (values_of(runs, model) for model in ('APE, 4 heads', 'RoPE-2D, 4 heads'))
    found = [
        [seed, f'{ape[seed]:.2f}', f'{rope[seed]:.2f}', f'{rope[seed] - ape[seed]:+.2f}', '']
        for seed in ape if seed in rope]
    trained, new = {row[0] for row in found}, {row['seed'] for row in second}
    for what, seeds in ((f'the {len(new)} new seeds', new), ('all seeds', {*ape, *new})):
        if seeds <= trained:
            ours, base = ({seed: values[seed] for seed in sorted(seeds)} for values in (rope, ape))
            found.append([what, spread(list(base.values())), *beside(ours, base)])
    return table(['seed', 'APE, 4 heads', 'RoPE-2D, 4 heads', 'difference', 'not paired'], found)


def long_lape():
    """The runs of LaPE in the longer training, and those of the same seeds that it is compared with."""
    return [row for name in ('long_lape_seeds', 'long_lape') for row in read_csv(RESULTS / 'cpu_long' / f'{name}.csv')]


def longer_lape():
    """LaPE with four heads after the longer training, beside two models; intervals corrected for the two."""
    lape, ape, rope = (values_of(long_lape(), f'{model}, 4 heads') for model in ('LaPE', 'APE', 'RoPE-2D'))
    found = [['top-1 (%)', *(f'{value:.2f}' for value in lape.values()), spread(list(lape.values())), '', '']]
    for name, base in (('APE', ape), ('RoPE-2D', rope)):
        gains = [f'{gain:+.2f}' for gain in subtract(lape, base)]
        gain, *intervals, _ = corrected_cells(lape, base, 2, 2).values()
        found.append([f'minus {name}', *gains, gain, *intervals])
    return table(['LaPE', *(f'seed {seed}' for seed in lape), 'mean', 'pairs', 'not paired'], found)


def encodings():
    """All encodings, with a link to the page of each."""
    names = {}
    for name in timm_sape.list_encodings(aliases=True):
        names.setdefault(timm_sape.get_encoding(name), []).append(name)
    head = ['name', 'full name', 'acts on', 'relative', 'attention', 'parameters added', 'on another grid', 'paper']
    return table(head, [
        [', '.join([f'[`{cls.name}`](encodings/{cls.name}.md)', *(f'`{name}`' for name in own if name != cls.name)]),
         encoding_title(cls.name), ', '.join(cls.acts_on()) or 'nothing', 'yes' if cls.relative else 'no',
         cls.attention_kernel(), cls.adds, cls.on_other_grids, f'[link]({cls.paper})' if cls.paper else '']
        for cls, own in sorted(names.items(), key=lambda item: item[0].name)])


def rules():
    """Each value of the keyword `resolution`, and the encodings that have it."""
    having = {}
    for name in timm_sape.list_encodings():
        for rule in timm_sape.get_encoding(name).rules:
            having.setdefault(rule, []).append(f'[`{name}`](encodings/{name}.md)')
    assert having.keys() == RULES.keys(), 'describe each rule in RULES'
    return table(['`resolution=`', 'what happens', 'encodings'], [
        [f"`'{rule}'`", text, ', '.join(having[rule])] for rule, text in RULES.items()])


COMMIT = re.compile(r'(?<=commit )\w+')


def commits_of(rows):
    return ', '.join(dict.fromkeys(COMMIT.search(row['notes'])[0] for row in rows))


def measured_with(rows):
    """The settings, machine and versions of a table. Its rows may be of several commits, and differ in nothing else."""
    notes, = {COMMIT.sub(commits_of(rows), row['notes']) for row in rows}
    return notes


def sizes():
    rows = [row for row in read_csv(RESULTS / 'resolutions_cpu.csv') if row['height'] == row['width']]
    found, widths = [], sorted({int(row['height']) for row in rows})
    for model, rule in (
            ('APE', 'own'), ('SaPE2(K)+APE', 'own'), ('RoPE-2D', 'rescale'), ('RoPE-2D', 'extrapolate')):
        own = [row for row in rows if row['model'] == model and row['rule'] == rule]
        means = [spread([float(row['top1']) for row in own if int(row['height']) == width], 1) for width in widths]
        found.append([model if rule == 'own' else f'{model}, `{rule}`', *means])
    return table(['top-1 (%)', *(f'{width} px' for width in widths)], found) + f'\n\n{measured_with(rows)}'


def grafted(name):
    return [{**row, 'model': row['graft']} for row in read_csv(RESULTS / f'finetune_graft_{name}.csv')]


def finetune():
    found = []
    for seeds, rows in (('0 to 7', grafted('cpu')), ('8 to 15, new', grafted('confirm'))):
        base = values_of(rows, 'none')
        for model in dict.fromkeys(row['model'] for row in rows):
            name = model if model == 'none' else f'`{model}`'
            found.append([name, seeds, *beside(values_of(rows, model), base)])
    rows = grafted('cpu') + grafted('confirm')
    found.append(['`rope2d`', 'all', *beside(values_of(rows, 'rope2d'), values_of(rows, 'none'))])
    return table(['grafted', 'seeds', 'top-1 (%)', 'difference from none', 'not paired'], found) + (
        f'\n\nEach seed has a base of its own; 95 % intervals; {measured_with(rows)}')


def position_bias():
    rows = read_csv(RESULTS / 'position_bias_cpu.csv')
    head = ['encoding', 'top-1', 'P-SHAP, classes that depend on position', 'P-SHAP, the others',
            'one-sided Mann-Whitney p']
    return table(head, [
        [f'`{row["encoding"]}`', row['top-1'], *(
            f'{float(row[f"P-SHAP, {kind}"]):.2f}'.removeprefix('0')
            for kind in ('position-dependent', 'independent')), row['p, one-sided'].replace('<', 'below ')]
        for row in rows])


def cost(name='cost_xeon'):
    rows = read_csv(RESULTS / f'{name}.csv')
    return f'{cost_table(rows)}\n\n{measured_with(rows)}'


def cost_liere():
    return cost('cost_liere')


def cost_epyc():
    return cost('cost_epyc')


SAPE2_FILES = (
    ('sape2_cpu', '[AMD EPYC](../results/sape2_cpu.csv), two threads'),
    ('sape2_cpu_1thread', '[AMD EPYC](../results/sape2_cpu_1thread.csv), one thread'),
    ('sape2_cpu_xeon', '[Intel Xeon](../results/sape2_cpu_xeon.csv), two threads'),
)


COMPILED_FILES = (
    ('sape2_cpp', 'AMD EPYC, two threads'),
    ('sape2_cpp_1thread', 'AMD EPYC, one thread'),
    ('sape2_cpp_xeon', 'Intel Xeon, two threads'),
    ('sape2_cpp_xeon_1thread', 'Intel Xeon, one thread'),
)


def sape2_compiled():
    """Operator and models in one table: the backends of each file were measured in the same run."""
    found = []
    for name, where in COMPILED_FILES:
        calls, models = read_csv(RESULTS / f'{name}.csv'), read_csv(RESULTS / f'{name}-models.csv')
        commit = commits_of(calls + models)
        rows = [
            ({'torch': 'PyTorch', 'cpp': 'compiled'}[row['backend']], row['n'] + ' patches', row['both_vs_plain'])
            for row in calls if row['backend'] in ('torch', 'cpp')]
        rows += [
            ({'torch': 'PyTorch', 'cpp': 'compiled'}[row['backend']], row['setting'], row['step_ratio'])
            for row in models if row['pos_enc'] == 'ape+sape2_k']
        for what in ('PyTorch', 'compiled'):
            own = {column: f'{float(ratio):.2f}' for made, column, ratio in rows if made == what}
            found.append((f'{what}, [{where}](../results/{name}.csv), commit {commit}', own))
    return table_of('', found)


def sape2():
    found = []
    for name, where in SAPE2_FILES:
        rows = read_csv(RESULTS / f'{name}.csv')
        ours = f'ours, {where}, commit {commits_of(rows)}'
        for backend, what in (('torch', ours), ('appendix', 'the code printed in the paper, corrected')):
            own = {f'{int(row["n"]):,}': f'{float(row["both_vs_plain"]):.1f}'
                   for row in rows if row['backend'] == backend}
            found.append((what, own))
    return table_of('patches', found)


def sape2_models():
    found = []
    for name, where in SAPE2_FILES:
        rows = read_csv(RESULTS / f'{name}-models.csv')
        own = {row['setting']: f'{float(row["step_ratio"]):.2f}' for row in rows
               if row['pos_enc'] == 'ape+sape2_k' and row['backend'] == 'torch'}
        found.append((f'{where.replace(".csv", "-models.csv")}, commit {commits_of(rows)}', own))
    return table_of('image size / patch size', found)


def kernels():
    """What the kernels of attention were compiled to, by shape; a backward pass has two launches or more."""
    versions = {version: read_csv(RESULTS / f'kernels_triton{version}.csv') for version in ('36', '39')}
    found = []
    for dtype, head_dim, grid in (
            *(('bfloat16', '64', grid) for grid in ('8x8', '14x14', '24x24', '64x64')),
            ('bfloat16', '128', '14x14'), ('bfloat16', '128', '64x64'), ('float32', '64', '14x14'),
            ('float32', '64', '24x24')):
        cells = []
        for rows in versions.values():
            own = [row for row in rows if row['per_logit'] and (
                row['dtype'], row['head_dim'], row['grid'], row['prefix'], row['mode']
            ) == (dtype, head_dim, grid, '1', 'k')]
            forward, = (row for row in own if row['kernel'].endswith('_forward'))
            backward = [float(row['least_ps']) for row in own if row is not forward]
            cells += [
                f'{float(forward["per_logit"]):.0f}', f'{float(forward["least_ps"]):.1f}', f'{math.fsum(backward):.1f}',
                str(max(int(row['stack']) for row in own))]
        found.append([f'{dtype}, {head_dim}', grid, *cells])
    what = ('instructions', 'forward, ps', 'backward, ps', 'spilled bytes')
    return table(['dtype, head dim', 'grid', *(f'{v[0]}.{v[1]}: {w}' for v in versions for w in what)], found)


GPU_COMMITS = 'dd1c9aa', 'f892df1'  # that the steps on the H200 were measured at, newest first


def gpu():
    """The operator in CUDA graphs on an H200 beside plain attention."""
    rows = [
        row for row in read_csv(RESULTS / 'h200' / 'graphs.csv')
        if (row['commit'], row['backend']) == ('f892df1', 'triton')]
    return table(['grid', 'images', 'forward', 'forward and backward'], [
        [row['grid'], row['batch'], f'{float(row["forward_vs_plain"]):.1f}', f'{float(row["both_vs_plain"]):.1f}']
        for row in rows])


def gpu_step_rows():
    """Newest training steps of ViT-S with 128 images on an H200, by model and backend, then by way."""
    rows, found = read_csv(RESULTS / 'h200' / 'steps.csv'), {}
    for commit in GPU_COMMITS:
        for row in rows:
            if f'commit {commit}' in row['notes'] and row['batch'] == '128':
                found.setdefault((row['model'], row['backend']), {}).setdefault(row['way'], row)
    return found


STEPS = {
    'eager': 'eager', 'compiled': '`torch.compile`', 'reduce-overhead': "with `mode='reduce-overhead'`",
    'graph': 'CUDA graph'}


def gpu_steps():
    """Training steps of ViT-S on an H200, beside APE in the same process."""
    def cell(row):
        star = '' if GPU_COMMITS[0] in row['notes'] else ' *'
        return f'{float(row["ms"]):.0f} ms, {float(row["to_ape"]):.2f}{star}'

    return table(['model', 'backend', *STEPS.values()], [
        [f'`{model}`', backend and f'`{backend}`', *(cell(own[way]) if way in own else '' for way in STEPS)]
        for (model, backend), own in gpu_step_rows().items()])


def timms():
    rows = read_csv(RESULTS / 'timm_cpu.csv')
    head = ["timm's model", 'ours', 'forward', 'step', 'memory']
    return table(head, [
        [f'`{row["timm"]}`', f'`{row["pos_enc"]}`',
         *(f'{float(row[f"{what}_ratio"]):.2f}' for what in ('forward', 'step', 'step_peak'))]
        for row in rows]) + f'\n\n{measured_with(rows)}'


def naflex():
    rows = read_csv(RESULTS / 'naflex_cpu.csv')
    head = ['encoding', "to timm's NaFlexVit", 'to the images one by one', "peak memory to timm's"]
    return table(head, [
        [f'`{row["pos_enc"]}`', *(f'{float(row[name]):.2f}' for name in ('to_timm', 'to_one_by_one', 'peak_to_timm'))]
        for row in rows]) + f'\n\n{measured_with(rows)}'


# pages of encodings


def sections(name):
    """The docstrings of an encoding's file and class as (about, equation, details, descriptions of keywords)."""
    cls = timm_sape.get_encoding(name)

    def require(found, what):
        if not found:
            raise ValueError(f'The page of {name!r} needs {what}, see "Add an encoding" in CONTRIBUTING.md.')

    about = inspect.cleandoc(inspect.getmodule(cls).__doc__ or '').split('\n\n')
    require(len(about) > 1, 'a docstring of its file, with the source and, after an empty line, what it does')
    require(cls.__doc__, 'a docstring of its class')
    family = next((base for base in cls.__mro__[1:] if base.__module__ == cls.__module__ and base.__doc__), None)
    paragraphs, keywords = [], ''
    for doc in filter(None, (cls.__doc__, family and family.__doc__)):
        doc = inspect.cleandoc(doc)
        keywords += f'{doc}\n\n'
        text = re.split(r'\n\n(?:Args|Raises|Inherited keywords):', doc)[0]
        paragraphs += text.split('\n\n')[1:] if doc.startswith(inspect.cleandoc(cls.__doc__)) else text.split('\n\n')
    entries = re.findall(r'^    (\w+): (.*(?:\n {8}.*)*)', keywords, flags=re.MULTILINE)
    base_doc = inspect.cleandoc(timm_sape.CoordinateEncoding.__doc__)
    entries += re.findall(r'^    (resolution): (.*(?:\n {8}.*)*)', base_doc, flags=re.MULTILINE)
    described = {}
    for keyword, text in entries:
        described.setdefault(keyword, ' '.join(text.split()))
    kind = name if name in EQUATIONS else name.split('_')[0]
    if kind in EQUATIONS:
        equation = EQUATIONS[kind].replace('{vector}', VECTORS.get(name.split('_')[-1], ''))
    else:
        require(paragraphs, 'an equation in the docstring of its class, after the title and an empty line')
        equation, *paragraphs = paragraphs
    missing = sorted(timm_sape.encoding_keywords(name).keys() - described.keys())
    require(not missing, f'a line below `Args:` for {", ".join(missing)}')
    return about, equation, paragraphs, described


def wrap(text, width=120):
    """Plain paragraphs as lines of this width; lists and tables stay."""
    if re.match(r'[-|]', text):
        return text
    return textwrap.fill(' '.join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def escape(text):
    """Stars in formulas are no emphasis."""
    return re.sub(r'(?<!`)\*', r'\\*', text)


def page(name):
    cls = timm_sape.get_encoding(name)
    about, equation, details, described = sections(name)
    source = ' '.join(about[0].split())
    lines = [
        f'# {name}: {encoding_title(name)}', '<!-- Written by `python docs/make_pages.py`. -->',
        wrap(escape(about[1])),
        f'```text\n{wrap(equation, 92)}\n```',  # as much as a page of the site shows
        f'![What it does between one patch and the others]({name}.png)',
        '*Seen from the framed patch. [What the picture shows](../gallery.md)*',
        *(wrap(escape(part)) for part in about[2:]),
    ]
    model = f'vit_small_{name}' if cls.alone else 'vit_small_pos_enc'
    pos_enc = name if cls.alone else f'{name}+sincos2d'
    argument = '' if cls.alone else f", pos_enc='{pos_enc}'"
    facts = [
        ['source', f'{source}{f" [Link]({cls.paper})" if cls.paper else ""}'],
        ['model', f"`timm.create_model('{model}'{argument})`" + (
            f', `{model}_ape`' if timm.is_model(f'{model}_ape') else '')],
        ['acts on', ', '.join(cls.acts_on()) or 'nothing'],
        ['attention', cls.attention_kernel()],
        ['depends on differences of positions only', 'yes' if cls.relative else 'no'],
        ['parameters added ([symbols](../encodings.md))', escape(cls.adds or 'none')],
        ['on another grid', cls.on_other_grids + (' ([rules](../resolutions.md#rules))' if cls.rules else '')],
        ['on NaFlexVit', NAFLEX_EXTRA.get(name) or ON_NAFLEX[cls.acts_on()[0]]],
        ['gate', {None: 'none', 1.0: f'`auto_{name}`, starts at 1'}.get(
            cls.gate_init, f'`auto_{name}`, starts at {cls.gate_init}')],
    ]
    lines += [table(['property', 'value'], facts), *(wrap(escape(part)) for part in details)]
    keywords = timm_sape.encoding_keywords(name)
    lines.append('## Keywords')
    if keywords:
        lines.append(table(['keyword', 'default', 'meaning'], [
            [f'`{keyword}`', f'`{default!r}`', escape(described[keyword]).replace('|', '\\|')]
            for keyword, default in keywords.items()]))
        lines.append(f"Give them as `pos_enc_kwargs={{'{name}': {{...}}}}`.")
    else:
        lines.append('None.')
    lines += ['## Cost and accuracy', cost_of(name)]
    lines.append(accuracy_of(name))
    return '\n\n'.join(line for line in lines if line) + '\n'


def cost_of(name):
    """Of the first table of costs that it is in."""
    pos_enc = name if timm_sape.get_encoding(name).alone else f'ape+{name}'
    for file in ('cost_xeon.csv', 'cost_epyc.csv'):
        rows = [row for row in read_csv(RESULTS / file) if row['pos_enc'] == pos_enc]
        if rows:
            break
    else:
        return 'It is not in [the table of costs](../cost.md) yet.'
    found = [[
        row['setting'], f'{int(row["params_added"]):,}',
        *(f'{float(row[f"{what}_ratio"]):.2f}' for what in ('forward', 'step', 'step_peak'))] for row in rows]
    return (
        f'`{rows[0]["pos_enc"]}` in ViT-S, as ratios to `ape` on a CPU ([all, and how they were measured](../cost.md)):'
        '\n\n'
        + table(['image / patch size', 'parameters added', 'forward', 'step', 'peak memory of a step'], found))


def accuracy_of(name):
    three, six, variants = (
        read_csv(RESULTS / 'cpu_cifar10' / f'{plan}.csv') for plan in ('plan', 'pairs', 'ablations'))
    found = []
    for model in (*MODELS.get(name, ()), *VARIANTS.get(name, ())):
        rows = next(rows for rows in (six, three, variants) if values_of(rows, model))
        values = values_of(rows, model)
        found.append([model, len(values), *beside(values, values_of(rows, 'APE'))])
    head = ['model', 'seeds', 'top-1 (%)', 'difference from APE', 'not paired']
    texts = [
        'Ten epochs of 10,000 images of CIFAR-10 with a small model, compared with APE with the same seeds. Each '
        'interval is\nfor one comparison ([what this says, and what it does not](../../results/README.md)):\n\n'
        + table(head, found)] if found else []
    chosen = [
        row for row in reference_table()[1]
        if name in (part.removeprefix('auto_') for part in row['pos_enc'].strip('`').split('+'))]
    if chosen:
        keys = [
            'model', 'learning rate', 'top-1 (%)', 'minus', 'difference', 'corrected, pairs', 'corrected, not paired']
        texts.append(
            'Here the seeds are 21 to 25, and each model has the learning rate chosen for it, out of two. Intervals '
            'are\ncorrected for the number of comparisons in [the whole table]'
            '(../choosing.md#every-encoding-at-a-learning-rate-chosen-for-it):\n\n'
            + table(keys, [[row[key] for key in keys] for row in chosen]))
    else:
        texts.append(
            'It is not in [the reference table](../choosing.md#every-encoding-at-a-learning-rate-chosen-for-it) yet.')
    return '\n\n'.join(texts)


# all files


TABLES = {
    f.__name__: f
    for f in (
        results, choosing, reference, longer, longer_seeds, longer_lape, encodings, rules, sizes, finetune,
        position_bias, cost, cost_liere, cost_epyc, timms, naflex, sape2, sape2_models,
        sape2_compiled, gpu, gpu_steps, kernels)}
PAGES = (ROOT / 'README.md', RESULTS / 'README.md', *sorted(DOCS.glob('*.md')))


def pages():
    """The text of each file that has anything generated, by its path."""
    texts = {}
    for path in PAGES:
        def fill(mark):
            return f'{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}'

        text = path.read_text(encoding='utf-8')
        text = re.sub(r'\[\d+ position encodings\]', f'[{len(timm_sape.list_encodings())} position encodings]', text)
        texts[path], count = re.subn(
            r'(<!-- begin (\w+): python docs/make_pages\.py -->)\n.*?(<!-- end \2 -->)', fill, text, flags=re.DOTALL)
        assert count == text.count('<!-- begin') == text.count('<!-- end'), f'{path}: a mark without its other'
    for name in timm_sape.list_encodings():
        texts[DOCS / 'encodings' / f'{name}.md'] = page(name)
    return texts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--pictures', action='store_true', help='draw the pictures again')
    args = parser.parse_args()
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding='utf-8')
    if args.pictures:
        from timm_sape.analysis.gallery import draw_gallery, gallery_panels
        panels = gallery_panels()
        draw_gallery(panels).savefig(DOCS / 'gallery.png', dpi=100)
        for panel in panels:
            draw_gallery([panel]).savefig(DOCS / 'encodings' / f'{panel.name}.png', dpi=100)


if __name__ == '__main__':
    main()
