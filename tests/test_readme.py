"""The figures in the documents are those that were measured. As a script, prints the encodings' table."""
import csv
import hashlib
import itertools
import json
import operator
import re
import shutil
import statistics
import subprocess
import sys
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml

from timm_sape.cli import experiment, main
from timm_sape.lab.bench import cost_table
from timm_sape.lab.experiment import load_plan, summary_table
from timm_sape.lab.experiment.results import read_archive
from timm_sape.lab.intervals import corrected_cells, corrected_intervals, mean_interval, unpaired_interval

ROOT = Path(__file__).parent.parent
README, DOCS, RESULTS = ROOT / 'README.md', ROOT / 'docs', ROOT / 'results'
ANSWERS, DETAILS = RESULTS / 'README.md', RESULTS / 'details.md'
TABLES = sorted(RESULTS.glob('*/*.md'))
NUMBERS = ('top1', 'top5', 'minutes', 'gpu_utilisation')


@cache
def read_csv(path):
    with open(path, newline='') as f:
        return list(csv.DictReader(f))


def test_costs_are_those_that_were_measured():
    results = list(RESULTS.glob('cost*.csv'))
    assert results
    for path in results:
        rows = read_csv(path)
        page = (DOCS / 'cost.md').read_text()
        assert cost_table(rows) in page and path.name in page


def test_costs_of_sape2_are_those_that_were_measured():
    """Forward and backward time over plain attention: for each file a line for our code and one for Appendix D."""
    lines = (DOCS / 'cost.md').read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r'\| ours, .*\(\.\./results/sape2_.*\.csv\)', line)]
    assert len(starts) == 3
    for start in starts:
        path = DOCS / re.search(r'\((.*?)\)', lines[start])[1]
        rows = read_csv(path)
        for line, backend in ((lines[start], 'torch'), (lines[start + 1], 'appendix')):
            found = [float(row['both_vs_plain']) for row in rows if row['backend'] == backend]
            assert line.split(' | ', 1)[1] == ' | '.join(f'{ratio:.1f}' for ratio in found) + ' |', line


def runs_of(plan):
    """Notes and rows of a table of runs. All runs have finished, with the accuracy in their summaries."""
    folder = RESULTS / 'cpu_cifar10'
    notes = (folder / f'{plan}.md').read_text().splitlines()[-1]
    rows = [
        {**row, **{key: float(row[key]) if row[key] else None for key in NUMBERS}}
        for row in read_csv(folder / f'{plan}.csv')]
    archived = read_archive(folder / 'runs.jsonl')
    for row in rows:
        epochs = archived[row['model'], int(row['seed'])].epochs
        assert round(epochs[9]['eval_top1'], 4) == row['top1'] and row['status'] == 'finished'
    return notes, rows


@pytest.mark.parametrize('table', TABLES, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_tables_are_those_of_the_archive(table, tmp_path, monkeypatch):
    """Byte for byte. (So are the curves, but they change with the version of matplotlib.)"""
    monkeypatch.setattr(experiment, 'find_spec', lambda name: None)  # no curves
    shutil.copy(table.parent / 'runs.jsonl', tmp_path)
    plan = ROOT / 'train_configs' / 'cpu_cifar10' / f'{table.stem}.yaml'
    assert main(['experiment', str(plan), '--output', str(tmp_path), '--tables']) == 0
    for path in (table, table.with_suffix('.csv')):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.full
def test_reference_table_is_that_of_its_runs(tmp_path):
    folder = RESULTS / 'cpu_cifar10' / 'reference'
    for name in ('runs.jsonl', 'measures.jsonl'):
        shutil.copy(folder / name, tmp_path)
    script = ROOT / 'examples' / 'reference_table.py'
    subprocess.run([sys.executable, script, 'table', '--output', tmp_path], check=True, capture_output=True)
    for name in ('reference.md', 'reference.csv'):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.full
@pytest.mark.parametrize('change, text', [
    ({'status': 'diverged'}, '`nope` | 0.00075 | 47.17 ± 0.73 | 3 of 5 | APE |'),
    ({'args': {'lr': 0.0015}}, 'none, seed 24 in {folder} was started with lr 0.0015, now it is 0.00075'),
])
def test_reference_table_of_incomplete_or_other_runs(change, text, tmp_path):
    """It says how many seeds a row has, also of its other columns, and takes no run that the plan does not have."""
    folder, lines = RESULTS / 'cpu_cifar10' / 'reference', []
    for line in map(json.loads, (folder / 'runs.jsonl').read_text().splitlines()):
        if line['label'] == 'none' and line['seed'] in (24, 25):
            line = {**line, **change, 'args': {**line['args'], **change.get('args', {})}}
        if line['label'].partition(',')[0] in ('APE', 'none'):  # Dunnett's intervals of all rows take long
            lines.append(json.dumps(line))
    (tmp_path / 'runs.jsonl').write_text('\n'.join(lines) + '\n')
    shutil.copy(folder / 'measures.jsonl', tmp_path)
    script = ROOT / 'examples' / 'reference_table.py'
    done = subprocess.run([sys.executable, script, 'table', '--output', tmp_path], capture_output=True, text=True)
    assert text.format(folder=tmp_path) in done.stdout + done.stderr


@pytest.mark.parametrize('folder', ['cpu_cifar10', 'cpu_digits', 'cpu_long', 'cpu_repository'])
def test_archives_have_the_runs_of_the_tables_once(folder):
    keys = [line.split(', "status"')[0] for line in (RESULTS / folder / 'runs.jsonl').read_text().splitlines()]
    assert len(keys) == len(set(keys))
    shown = {
        (row['model'], int(row['seed']))
        for table in TABLES if table.parent.name == folder for row in read_csv(table.with_suffix('.csv'))
        if row['status'] != 'waiting'}
    assert set(read_archive(RESULTS / folder / 'runs.jsonl')) == shown


def test_a_line_of_the_archive_repeats_the_run(tmp_path, monkeypatch):
    """The code of EXPERIMENTS.md writes the options that the plan had."""
    guide = (ROOT / 'train_configs' / 'EXPERIMENTS.md').read_text()
    code, = re.findall(r'```python\n(.*?)```', guide, flags=re.DOTALL)
    (tmp_path / 'results').symlink_to(RESULTS)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    run, = load_plan(ROOT / 'train_configs' / 'cpu_cifar10' / 'plan.yaml').select(['APE'], [1])
    assert yaml.safe_load(Path('config.yaml').read_text()) == run.config


def top1_of(plan, seeds='123'):
    """Top-1 of each model with exactly these seeds."""
    top1 = {(row['model'], row['seed']): row['top1'] for row in runs_of(plan)[1]}
    models = {model for model, _ in top1}
    assert len(top1) == len(seeds) * len(models)
    return {model: [top1[model, seed] for seed in seeds] for model in models}


def test_results_are_those_of_the_runs():
    """Top-1 and the difference from APE, line by line."""
    notes, rows = runs_of('plan')
    table = summary_table(rows, 'APE').splitlines()
    assert notes in DETAILS.read_text() and len(table) == 2 + len({row['model'] for row in rows})
    for line in table[2:]:
        assert f'\n{line.rsplit(" | ", 3)[0]} | ' in ANSWERS.read_text(), line


def difference_of(values, others, digits=2):
    """The mean of three to seven differences with its t interval."""
    found = [a - b for a, b in zip(values, others)]
    t = {3: 4.302653, 4: 3.182446, 5: 2.776445, 6: 2.570582, 7: 2.446912}[len(found)]
    mean, half = statistics.mean(found), t * statistics.stdev(found) / len(found) ** 0.5
    return f'{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]'


def spread_of(found, digits=2):
    return f'{statistics.mean(found):.{digits}f} ± {statistics.stdev(found):.{digits}f}'


def test_ablations_are_those_of_the_runs():
    """Top-1, and the differences from the unchanged model and from APE with their t intervals."""
    top1 = top1_of('ablations')
    tables = DETAILS.read_text().split('\n| change of ')
    assert len(top1) == 17
    for model in top1.keys() - {'APE', 'SaPE2(K)', 'SaPE2(K)+APE'}:
        base = 'SaPE2(K)+APE' if '+APE' in model else 'SaPE2(K)'
        end = ' | '.join((
            spread_of(top1[model]), *(difference_of(top1[model], top1[other]) for other in (base, 'APE'))))
        table, = (table.split('\n\n')[0] for table in tables if table.startswith(f'{base} | '))
        assert f' | {end} |\n' in f'{table}\n', (model, end)


def test_pooled_models_are_those_of_the_runs():
    """Top-1, and the differences from APE, from none and from the models with a class token."""
    pooled, with_token = top1_of('pooling'), top1_of('plan')
    page = DETAILS.read_text()
    assert len(pooled) == 5
    for name, found in pooled.items():
        model = name.removesuffix(', pooled')
        line = ' | '.join((
            model, spread_of(found),
            *('' if name == base else difference_of(found, pooled[base]) for base in ('APE, pooled', 'none, pooled')),
            difference_of(found, with_token[model])))
        assert f'| {line} |' in page, line


def test_rates_are_those_of_the_runs():
    """Top-1 of both models at each learning rate, and their difference."""
    top1 = top1_of('rates')
    page = DETAILS.read_text()
    suffixes = {name.removeprefix('APE') for name in top1 if name.startswith('APE')}
    # two models at four rates, RoPE-2D at two, relative bias and Shaw at three
    assert len(suffixes) == 4 and len(top1) == 2 * 4 + 2 + 2 * 3
    for suffix in suffixes:
        ape, sape2 = (top1[f'{model}{suffix}'] for model in ('APE', 'SaPE2(K)+APE'))
        line = ' | '.join((
            suffix.removeprefix(', rate ') or '.0015',
            *(spread_of(found) for found in (ape, sape2)),
            difference_of(sape2, ape)))
        assert f'| {line} |' in page, line


def test_models_at_half_the_rate_are_those_of_the_runs():
    """Top-1, the difference from APE at that rate, and from the same model at the recipe's."""
    half, recipe = top1_of('half_rate'), top1_of('plan')
    page = DETAILS.read_text()
    assert len(half) == len(recipe) == 10
    for model in recipe:
        found, ape = (half[f'{name}, rate .00075'] for name in (model, 'APE'))
        line = ' | '.join((
            model, spread_of(found), '' if model == 'APE' else difference_of(found, ape),
            difference_of(found, recipe[model])))
        assert f'| {line} |' in page, line


def test_ablations_at_half_the_rate_are_those_of_the_runs():
    """Top-1, the differences from the unchanged model and from APE at that rate, and from the same at the recipe's."""
    half, recipe = top1_of('half_rate_ablations'), top1_of('ablations')
    page = DETAILS.read_text()
    assert len(half) == 7
    unchanged, ape = half['SaPE2(K)+APE, rate .00075'], half['APE, rate .00075']
    for model in half.keys() - {'APE, rate .00075', 'SaPE2(K)+APE, rate .00075'}:
        others = unchanged, ape, recipe[model.removesuffix(', rate .00075')]
        end = ' | '.join((spread_of(half[model]), *(difference_of(half[model], other) for other in others)))
        assert f' | {end} |\n' in page, (model, end)


def test_new_seeds_are_those_of_the_runs():
    """Top-1 of three models at both rates, and the difference from APE with both intervals."""
    top1 = top1_of('pairs', '456789')
    assert len(top1) == 6
    page = DETAILS.read_text()
    for rate, end in (('.00075', ', rate .00075'), ('.0015', '')):
        ape = top1[f'APE{end}']
        assert f'| {rate} | APE | {spread_of(ape)} |' in page
        for model in ('SaPE2(K)+APE', 'RoPE-2D'):
            found = top1[f'{model}{end}']
            unpaired = '[{:+.2f}, {:+.2f}]'.format(*unpaired_interval(found, ape))
            line = ' | '.join((rate, model, spread_of(found), difference_of(found, ape), unpaired))
            assert f'| {line} |' in page, line


LAPE_SEEDS = [str(seed) for seed in range(41, 47)]


def test_lape_and_rope_are_those_of_the_runs():
    """Top-1 with two heads and with four, and the difference with both intervals."""
    top1 = top1_of('lape', LAPE_SEEDS)
    for heads, end in ((2, ''), (4, ', 4 heads')):
        lape, rope = (top1[f'{name}{end}'] for name in ('LaPE', 'RoPE-2D'))
        unpaired = '[{:+.2f}, {:+.2f}]'.format(*unpaired_interval(lape, rope))
        line = ' | '.join((str(heads), spread_of(rope), spread_of(lape), difference_of(lape, rope), unpaired))
        assert f'| {line} |' in DETAILS.read_text(), line
    lead = '`lape` has a higher mean, but is not shown to be ahead of `rope2d`.'
    assert lead in README.read_text() and not any(verdicts(top1['LaPE'], top1['RoPE-2D']))
    assert statistics.mean(top1['LaPE']) > statistics.mean(top1['RoPE-2D'])


def test_differences_that_hang_on_the_interval():
    """One of the two intervals excludes 0, the other does not."""
    top1 = reduce(operator.or_, map(top1_of, ('plan', 'ablations', 'half_rate', 'half_rate_ablations', 'pooling')))
    page = DETAILS.read_text()
    lines = [line.strip('| ').split(' | ') for line in page.splitlines() if line.count('[') == 2]
    lines = [(cells[0].split(' - '), cells[1:]) for cells in lines if top1.keys() >= set(cells[0].split(' - '))]
    lines = [(models, printed) for models, printed in lines if len(models) == 2]
    assert len(lines) == 16
    for (model, base), printed in lines:
        values, others = top1[model], top1[base]
        mean, *paired = mean_interval([a - b for a, b in zip(values, others)])
        unpaired = unpaired_interval(values, others)
        assert printed == [f'{mean:+.2f}', *('[{:+.2f}, {:+.2f}]'.format(*ends) for ends in (paired, unpaired))]
        assert sum(low < 0 < high for low, high in (paired, unpaired)) == 1


def cells_of(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.split('|')[1:-1]]


def listed(names):
    """At least two names in a sentence."""
    names = [name.replace(', 4 heads', ' (4 heads)') for name in names]
    return f'{", ".join(names[:-1])} and {names[-1]}'


def prose(page):
    return ' '.join(page.read_text().split())


def digits_top1():
    """Top-1 of each model trained on digits, with seeds 1 to 3."""
    top1 = {(row['model'], row['seed']): float(row['top1']) for row in read_csv(RESULTS / 'cpu_digits/foreground.csv')}
    return {model: [top1[model, seed] for seed in '123'] for model, _ in top1}


def test_digits_are_those_of_the_runs():
    """Top-1 of both models at both learning rates, and their difference."""
    top1 = digits_top1()
    for rate, end in (('.0015', ''), ('.0005', ', rate .0005')):
        ape, sape2 = (top1[f'{model}{end}'] for model in ('APE', 'SaPE2(K)+APE'))
        line = ' | '.join((rate, spread_of(ape), spread_of(sape2), difference_of(sape2, ape)))
        assert f'| {line} |' in DETAILS.read_text()


def five_seeds(table='cpu_cifar10/reference/reference.csv', first=21):
    """Top-1 of each model of the reference table, or of another with five seeds."""
    top1 = {}
    for row in read_csv(RESULTS / table):
        top1.setdefault(row['model'], {})[row['seed']] = float(row['top1'])
    return {model: [found[str(seed)] for seed in range(first, first + 5)] for model, found in top1.items()}


def first_trainings():
    """Top-1 of the rows of the reference table that were trained twice, in their first training; a list over seeds."""
    lines = (RESULTS / 'cpu_cifar10' / 'reference' / 'first_trainings.jsonl').read_text().splitlines()
    found = {}
    for run in sorted(map(json.loads, lines), key=lambda run: run['seed']):
        found.setdefault(run['label'], []).append(run['epochs']['eval_top1'][-1])
    return found


def repository():
    """Top-1 of each of the repository's rows."""
    return five_seeds('cpu_repository/repository.csv', first=10)


def retrofit(key, base, size, model='not fine-tuned', **where):
    """Figures of a trained model at another size, or of what it was fine-tuned to, a list over seeds."""
    wanted = {'base': base, 'size': str(size), 'model': model, 'split': 'test', **where}
    return [float(row[key]) for row in read_csv(RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.csv')
            if wanted.items() <= row.items()]


def over_bases(key, size, model, other):
    """Figures of models that were fine-tuned to `model` and to `other`, averaged over the four bases; by seed."""
    bases = ('APE', 'sincos2d', 'RoPE-2D', 'RoPE-2D mixed')
    return [
        [statistics.mean(of_seed) for of_seed in zip(*(retrofit(key, base, size, each)[:3] for base in bases))]
        for each in (model, other)]


def areas(name):
    """Areas under the ROC curve by model, then by state, score and mask; a list over seeds."""
    found = {}
    for row in read_csv(RESULTS / f'foreground_{name}_cpu.csv'):
        scores = found.setdefault(row['model'], {})
        scores.setdefault((row['state'], row['score'], row['mask']), []).append(float(row['both']))
    return found


def test_foreground_is_that_of_the_measurement():
    """The areas of each score, and the differences of SaPE2(K)+APE, for white ink and texture."""
    page = re.sub(r'(?<!\d)\.(?=\d)', '0.', DETAILS.read_text())
    files = areas('white'), areas('texture')
    for model, state, score in (
            ('SaPE2(K)+APE', 'trained', 'distance'), ('SaPE2(K)+APE', 'untrained', 'distance'),
            ('APE', 'trained', 'content'), ('SaPE2(K)+APE', 'trained', 'content'),
            ('APE', 'trained', 'keys'), ('SaPE2(K)+APE', 'trained', 'keys'),
            ('', 'no model', 'colour'), ('SaPE2(K)+APE', 'trained', 'logits')):
        cells = []
        for found in files:
            own, shuffled = (found[model][state, score, mask] for mask in ('own', 'shuffled'))
            cells += [spread_of(own, 3) if model else f'{own[0]:.3f}', f'{statistics.mean(shuffled):.3f}']
        assert f' | {" | ".join(cells)} |\n' in page, (model, state, score)

    distance, keys = ('trained', 'distance', 'own'), ('trained', 'keys', 'own')
    pairs = [
        (distance, ('trained', 'distance', 'shuffled')), (distance, keys), (distance, ('untrained', 'distance', 'own'))]
    of_cifar10, of_digits = [found['SaPE2(K)+APE'] for found in files], [
        areas(f'{name}_digit_models')['SaPE2(K)+APE, rate .0005'] for name in ('white', 'texture')]
    for models, (score, other) in (
            *itertools.product((of_cifar10, of_digits), pairs),
            (of_cifar10, (distance, ('trained', 'content', 'own'))),
            (of_cifar10, (('trained', 'logits', 'own'), ('trained', 'logits', 'shuffled')))):
        cells = (difference_of(found[score], found[other], 3) for found in models)
        assert f' | {" | ".join(cells)} |\n' in page, (score, other)


def kept(name, column, start, at):
    """Accuracy above chance by model and rule, in percent of that at `start`, a list over seeds."""
    above = {}
    for row in read_csv(RESULTS / name):
        if row.get('height') == row.get('width'):
            values = above.setdefault((row['model'], row.get('rule', 'own')), {})
            values[row[column], row['seed']] = float(row['top1']) - 10
    return {model: [100 * values[at, s] / values[start, s] for s in '123'] for model, values in above.items()}


def verdicts(values, others):
    """Whether each of the two intervals of a difference excludes 0. Shown is what both of them do."""
    intervals = mean_interval([a - b for a, b in zip(values, others)])[1:], unpaired_interval(values, others)
    return [low > 0 or high < 0 for low, high in intervals]


PAIRS = 'by pairs'  # of scores of the same models


def claims():
    """What each page says about differences: words, the values of both sides, digits, and whether it is shown."""
    ten, six, rates = top1_of('plan'), top1_of('pairs', '456789'), top1_of('rates')
    changes, pooled, digits = top1_of('ablations'), top1_of('pooling'), digits_top1()
    sape2, sape2_half, ape_half = 'SaPE2(K)+APE', 'SaPE2(K)+APE, rate .00075', 'APE, rate .00075'
    gains = [[a - b for a, b in zip(six[f'{model}, rate .00075'], six[model])] for model in (sape2, 'APE')]
    sizes, shifts = kept('resolutions_cpu.csv', 'height', '32', '64'), kept('shifts_cpu.csv', 'shift', '0', '8')
    roc, half = areas('white')[sape2], top1_of('half_rate')
    # the first three seeds are older
    long_rope, long_ape, long_lape = (
        list(longer_training()[f'{model}, 4 heads'].values()) for model in ('RoPE-2D', 'APE', 'LaPE'))
    distance = roc['trained', 'distance', 'own']
    five, first = five_seeds(), first_trainings()
    rope, mixed, lapes = 'RoPE-2D', 'RoPE-2D mixed', top1_of('lape', LAPE_SEEDS)
    rows, equal = repository(), ', no LayerScale'
    answers = [
        ('ahead, too**: {} over APE with four (five seeds).', five['RoPE-2D, 4 heads'], five['APE, 4 heads'], 2,
         True),
        ("ahead of APE at the recipe's learning rate, {},", six['RoPE-2D'], six['APE'], 2, True),
        ('and at half of it, {}.', six['RoPE-2D, rate .00075'], six[ape_half], 2, True),
        ('to be ahead of RoPE-2D: {} with two heads,', lapes['LaPE'], lapes[rope], 2, False),
        ('with two heads, {} with four.', lapes['LaPE, 4 heads'], lapes[f'{rope}, 4 heads'], 2, False),
        ('with the five seeds of the reference table, trained on two kinds of CPU, {}. In the', five[sape2],
         five['SaPE2(Q)+APE'], 2, False),
        ('Alone, SaPE2(K) is behind APE: {}', ten['SaPE2(K)'], ten['APE'], 2, True),
        ('SaPE2(K)+APE is behind APE, six seeds: {}', six[sape2], six['APE'], 2, True),
        ('covers a loss and a gain, six seeds: {}', six[sape2_half], six[ape_half], 2, False),
        ('at half the rate, six seeds: {}', six['RoPE-2D, rate .00075'], six[sape2_half], 2, True),
        ('costs SaPE2(K)+APE far more, {},', rates[f'{sape2}, rate .003'], rates[sape2], 2, True),
        ('than APE, {}.', rates['APE, rate .003'], rates['APE'], 2, True),
        ('to 80 %: {}', digits[f'{sape2}, rate .0005'], digits[sape2], 2, True),
        ('SaPE2(K)+APE gains more than APE at half the rate, six seeds: {}', *gains, 2, False),
        ('K minus Q, both with APE: {}', changes[sape2], changes['SaPE2(Q)+APE'], 2, False),
        ('squared distances cost most, {},', changes['K+APE, squared distance'], changes[sape2], 2, True),
        ('then tables whose initial values have a standard deviation of .5: {}', changes['K+APE, table .5'],
         changes[sape2], 2, True),
        ('87 %: {}', sizes[sape2, 'own'], sizes['APE', 'own'], 1, False),
        ('if positions are rescaled, more than APE: {}', sizes['RoPE-2D', 'rescale'], sizes['APE', 'own'], 1, True),
        ('less than APE: {}', sizes['RoPE-2D', 'extrapolate'], sizes['APE', 'own'], 1, True),
        ('82 %: {}', shifts[sape2, 'own'], shifts['APE', 'own'], 1, False),
        ('SaPE2(K) alone keeps more than APE, {};', shifts['SaPE2(K)', 'own'], shifts['APE', 'own'], 1, True),
        ('so does a model without position, {}.', shifts['none', 'own'], shifts['APE', 'own'], 1, True),
        ('with the masks of other images: {}', distance, roc['trained', 'distance', 'shuffled'], 3, True),
        ('planned before they ran, give {},', long_rope[3:], long_ape[3:], 2, False),
        ('and all seven {}: no lead is shown.', long_rope, long_ape, 2, False),
        ('with each of the seven seeds, {}, and', long_lape, long_ape, 2, True),
        ("SaPE2's area minus the area for that distance is {}", distance, roc['trained', 'keys', 'own'], 3, PAIRS),
        ('without a class token, it is as far behind APE: {}',
         pooled['relative bias, pooled'], pooled['APE, pooled'], 2, False),
        ('SaPE2(Q)+APE is ahead, five seeds, half the rate: {}; both intervals', rows['q.e+APE'], rows['APE'], 2, True),
        ('If neither model has LayerScale, its lead is {}. That is not shown: the interval that is not paired includes',
         rows['q.e+APE'], rows[f'APE{equal}'], 2, False),
        ('Q is ahead of K by {}, but the other interval includes 0.', rows['q.e+APE'], rows['k.e+APE'], 2, False),
        ('it changes RoPE-2D mixed by {}.', rows[mixed], rows[mixed + equal], 2, True),
        ('LaPE has the highest mean. It is ahead of APE, {}, but was picked', five['LaPE'], five['APE'], 2, True),
        ("at the recipe's rate, SaPE2(Q) is ahead of the model without position: {}.", changes['SaPE2(Q)'], ten['none'],
         2, True),
        ('keeps more of its accuracy above chance than APE, {},',
         retrofit('kept', rope, 64), retrofit('kept', 'APE', 64), 1, True),
    ]
    details = [
        ('LayerScale itself changes APE by {},', rows['APE'], rows[f'APE{equal}'], 2, False),
        ('RoPE-2D by {} and', rows[rope], rows[rope + equal], 2, True),
        ('RoPE-2D mixed by {}: it', rows[mixed], rows[mixed + equal], 2, True),
        ('q.e is not shown to differ from k.e: {} (', rows['q.e+APE'], rows['k.e+APE'], 2, False),
        ('nor from its form with separate keys: {}.', rows['q.e+APE'], rows['q.e, separate keys+APE'], 2, False),
        ('The five seeds of the reference table show it ahead, {}. They', five[mixed], five['APE'], 2, True),
        ('LaPE is ahead of RoPE-2D too, {}.', five['LaPE'], five[rope], 2, True),
        ('after one more LayerNorm: {}.', five['LaPE'], five['APE'], 2, True),
        ('by four heads instead of two: RoPE-2D {},', lapes[f'{rope}, 4 heads'], lapes[rope], 2, True),
        ('LaPE {}. The other', lapes['LaPE, 4 heads'], lapes['LaPE'], 2, True),
        ('APE with four is ahead of APE with two, {},', five['APE, 4 heads'], five['APE'], 2, True),
        ('is not shown to differ from APE with four: {}. But', five[rope], five['APE, 4 heads'], 2, False),
        ('on the same CPU, the differences are {}', first['APE, 4 heads'], five['APE'], 2, True),
        ('differences are +1.76 [+1.28, +2.25] and {}.', five[rope], first['APE, 4 heads'], 2, False),
        ('ahead, too**: {} over APE with four.', five['RoPE-2D, 4 heads'], five['APE, 4 heads'], 2, True),
        ('SaPE2(K) alone is not shown to be ahead of the model without position: {}.', five['SaPE2(K)'], five['none'],
         2, False),
        ('is not shown to differ from APE either: {}.', five[f'{sape2}, 4 heads'], five['APE, 4 heads'], 2, False),
        ('RoPE-2D with four heads is ahead of it: {}.', five[f'{rope}, 4 heads'], five[f'{sape2}, 4 heads'], 2, True),
        ('not shown to be ahead of the model without position: {}. LookHere', first['FIRE'], five['none'], 2, False),
        ('RoPE-2D keeps more than APE, {},', retrofit('kept', rope, 64), retrofit('kept', 'APE', 64), 1, True),
        ('at 64 px the difference is {}.', retrofit('kept', 'LookHere, 4 heads', 64),
         retrofit('kept', 'APE, 4 heads', 64), 1, False),
        ('SaPE2(K) changes what is kept at 96 px by {}',
         *over_bases('kept', 96, 'sape2_k', 'unchanged'), 1, False),
        ('and PaPE by {}.', *over_bases('kept', 96, 'pape', 'unchanged'), 1, False),
        ('PaPE at 128 px, {}, but', *over_bases('kept', 128, 'pape', 'unchanged'), 1, False),
        ('gave {} points of top-1 at 32 px', *over_bases('top1', 32, 'unchanged', 'not fine-tuned'), 2, True),
        ('At 96 px no change is shown: {};', *over_bases('top1', 96, 'unchanged', 'not fine-tuned'), 2, False),
        ('where the other interval includes 0: {}.', *over_bases('top1', 128, 'unchanged', 'not fine-tuned'), 2,
         False),
        ("ahead of APE at the recipe's learning rate, {},", six['RoPE-2D'], six['APE'], 2, True),
        ('and at half of it, {}.', six['RoPE-2D, rate .00075'], six[ape_half], 2, True),
        ("RoPE-2D mixed comes nearest, at the recipe's rate: {}", ten['RoPE-2D mixed'], ten['APE'], 2, False),
        ('Relative bias is behind APE, {};', ten['relative bias'], ten['APE'], 2, True),
        ('With six seeds APE changes by {} and', six[ape_half], six['APE'], 2, False),
        ('in white ink training makes it worse, {}.', distance, roc['untrained', 'distance', 'own'], 3, True),
        *((f'{form} {{}}', five[form], five['none'], 2, False)
          for form in ('SaPE2(Q)', 'SaPE2(QK)', 'SaPE2(K) squared', 'SaPE2(Q) squared')),
        ('with seeds 1 to 3 and each comparison on its own: SaPE2(Q), {},', changes['SaPE2(Q)'], ten['none'], 2, True),
        ('with the distance subtracted, {}.', changes['K, negative'], ten['none'], 2, True),
        ('with seeds 1 to 3 it gains {}.', half['none, rate .00075'], ten['none'], 2, True),
    ]
    return {ANSWERS: answers, DETAILS: details}


def without_tables(page):
    """The prose of a page in one line."""
    return ' '.join(' '.join(line for line in page.read_text().splitlines() if not line.startswith('|')).split())


@pytest.mark.parametrize('page', [ANSWERS, DETAILS], ids=lambda page: page.stem)
def test_answers_are_those_of_the_runs(page):
    """Each difference in the prose, and whether it counts as shown. (The details have more, which are tested below.)"""
    text, checked = without_tables(page), []
    for words, values, others, digits, shown in claims()[page]:
        checked.append(difference_of(values, others, digits))
        assert words.format(checked[-1]) in text, (words, checked[-1])
        found = verdicts(values, others)
        assert found[0] if shown == PAIRS else all(found) == shown, words
    if page == ANSWERS:
        assert sorted(checked) == sorted(re.findall(r'[+-][\d.]+ \[.*?\]', text))


def test_sape2_added_to_rotations():
    five = five_seeds()
    for rotation in ('RoPE-2D', 'RoPE-2D mixed'):
        for gate in ('', ', gate 0'):
            values, others = five[f'{rotation}+SaPE2(K){gate}'], five[rotation]
            row = f'| {rotation}{gate.replace("gate", "gate at")} | {difference_of(values, others, 2)} | no'
            assert row in DETAILS.read_text() and not all(verdicts(values, others))


def losses_apart(runs):
    """How far the loss on test images ends above that on training images, least and most of all runs."""
    last = [list(run.epochs.values())[-1] for run in runs]
    gaps = [epoch['eval_loss'] - epoch['train_loss'] for epoch in last]
    return [f'{gap:.2f}'.removeprefix('0') for gap in (min(gaps), max(gaps))]


def longer_training():
    """Top-1 after 40 epochs, by model and seed."""
    top1 = {}
    for (label, seed), run in sorted(read_archive(RESULTS / 'cpu_long' / 'runs.jsonl').items()):
        top1.setdefault(label, {})[seed] = list(run.epochs.values())[-1]['eval_top1']
    return top1


def test_the_longer_training():
    """Who is ahead with which seeds, and which difference is shown; the table is generated."""
    runs = read_archive(RESULTS / 'cpu_long' / 'runs.jsonl')
    reference = read_archive(RESULTS / 'cpu_cifar10' / 'reference' / 'runs.jsonl')
    every = longer_training()
    top1 = {
        label: {seed: value for seed, value in found.items() if seed <= 33} for label, found in every.items()
        if min(found) <= 33 and not label.startswith('LaPE')}
    new = {label: [seed for seed in found if seed > 33] for label, found in every.items() if max(found) > 33}
    assert len(top1) == 6 and all(list(values) == [31, 32, 33] for values in top1.values())
    pairs = {
        'RoPE-2D mixed': 'APE', 'RoPE-2D, 4 heads': 'APE, 4 heads', 'SaPE2(K)+APE': 'APE', 'SaPE2(Q)+APE': 'APE'}
    gains, shown, corrected = {}, {}, {}
    for model, base in pairs.items():
        gains[model] = [a - b for a, b in zip(top1[model].values(), top1[base].values())]
        shown[model] = all(verdicts(list(top1[model].values()), list(top1[base].values())))
        corrected[model] = [
            low > 0 or high < 0 for low, high in corrected_intervals(top1[model], top1[base], len(pairs))[1:]]
    five, text = five_seeds(), prose(ANSWERS)

    def ahead(model):
        lead = statistics.mean(five[model]) - statistics.mean(five[pairs[model]])
        return f'{model.replace(", 4", " with four")} is {lead:.2f} points ahead of '

    assert [model for model in pairs if shown[model]] == ['SaPE2(K)+APE']
    summary = 'SaPE2(K)+APE is still behind APE. Rotations are no longer shown to be ahead of it; LaPE is, by a little.'
    assert summary in text
    assert ahead('RoPE-2D mixed') + 'APE. Here its lead is smaller, and one of three seeds has none.' in text
    assert sum(gain > 0 for gain in gains['RoPE-2D mixed']) == 2 and 0 < statistics.mean(gains['RoPE-2D mixed']) < 2.19
    text_of_four = 'APE with four. Here it is ahead with each of the three seeds, but by less than'
    assert ahead('RoPE-2D, 4 heads') + text_of_four in text
    assert min(gains['RoPE-2D, 4 heads']) > 0 and statistics.mean(gains['RoPE-2D, 4 heads']) < 1.5
    # for the differences see `claims`
    assert new == dict.fromkeys(['APE, 4 heads', 'LaPE, 4 heads', 'RoPE-2D, 4 heads'], [34, 35, 36, 37])
    lape, ape, rope = (
        {seed: every[f'{name}, 4 heads'][seed] for seed in range(31, 38)} for name in ('LaPE', 'APE', 'RoPE-2D'))
    lead, unpaired = difference_of([*lape.values()], [*ape.values()]), unpaired_interval(lape.values(), ape.values())
    assert (
        f'LaPE is ahead of APE with each of the seven seeds, {lead}, and the interval that is not paired excludes 0 as '
        'well: [{:+.2f}, {:+.2f}].'.format(*unpaired)) in text
    assert all(lape[seed] > ape[seed] for seed in ape) and corrected_cells(lape, ape, 1)['shown'] == 'yes'
    assert 'corrected for the two comparisons, as in the table, only the paired one does.' in text
    assert [low > 0 for low, _ in corrected_intervals(lape, ape, 2)[1:]] == [True, False]
    short = re.fullmatch(r'\+(.*) \[\+(.*), \+(.*)\]', lead)
    assert '`lape` is ahead of `ape` by {} points ({} to {}, seven seeds)'.format(*short.groups()) in prose(README)
    assert 'LaPE is not shown to be ahead of RoPE-2D.' in text and corrected_cells(lape, rope, 1)['shown'] == 'no'
    assert 'SaPE2(K)+APE is behind APE: both intervals exclude 0.' in text
    assert corrected.pop('SaPE2(K)+APE') == [False, True] and not any(map(any, corrected.values()))
    assert 'Corrected for the four comparisons, only the unpaired interval does.' in text
    assert 'SaPE2(Q)+APE has a lower accuracy than APE with all three seeds, but both intervals' in text
    assert max(gains['SaPE2(Q)+APE']) < 0
    low, high = losses_apart(runs.values())
    _, most = losses_apart(run for (label, _), run in reference.items() if ', trial at ' not in label)
    text = f'ends {low} to {high} above that on training images, in the reference table at most {most}.'
    assert text in prose(DETAILS)


def test_the_comparison_of_the_repository_is_that_of_the_runs():
    """The differences as the repository has its rows, and with equal blocks; and what is said about them."""
    rows, shown = repository(), {}
    for model, other in itertools.product(('q.e+APE', 'k.e+APE'), ('APE', 'RoPE-2D mixed')):
        cells = [f'{model} minus {other}']
        for base in (other, f'{other}, no LayerScale'):
            cells += [difference_of(rows[model], rows[base]), '[{:+.2f}, {:+.2f}]'.format(
                *unpaired_interval(rows[model], rows[base]))]
            shown[model, base] = all(verdicts(rows[model], rows[base]))
        assert f'| {" | ".join(cells)} |' in DETAILS.read_text(), cells
    for page in (ANSWERS, DETAILS):
        assert 'With blocks as in the repository, q.e+APE is ahead of APE and of RoPE-2D mixed' in prose(page)
        text = 'With equal blocks q.e+APE and k.e+APE are behind RoPE-2D mixed, and neither is shown to differ from APE'
        assert text in prose(page)
    assert 'there q.e+APE is ahead of APE and of RoPE-2D mixed, each as a single comparison' in prose(DETAILS)
    assert shown['q.e+APE', 'APE'] and shown['q.e+APE', 'RoPE-2D mixed']
    assert statistics.mean(rows['q.e+APE']) > max(statistics.mean(rows[name]) for name in ('APE', 'RoPE-2D mixed'))
    for model in ('q.e+APE', 'k.e+APE'):
        assert shown[model, 'RoPE-2D mixed, no LayerScale'] and not shown[model, 'APE, no LayerScale']
        assert statistics.mean(rows[model]) < statistics.mean(rows['RoPE-2D mixed, no LayerScale'])
    pairs = [
        *shown, *((model, f'{model}, no LayerScale') for model in ('APE', 'RoPE-2D', 'RoPE-2D mixed')),
        ('q.e+APE', 'k.e+APE'), ('q.e+APE', 'q.e, separate keys+APE')]
    found = [
        corrected_intervals(*(dict(enumerate(rows[model])) for model in pair), len(pairs))[1:] for pair in pairs]
    assert f'Corrected for all {len(pairs)} of this section, only the change of RoPE-2D mixed by' in prose(DETAILS)
    assert f'Corrected for all {len(pairs)} comparisons, only this change is shown.' in prose(ANSWERS)
    # what the answers say about the other interval
    for model, other in (('q.e+APE', 'APE, no LayerScale'), ('q.e+APE', 'k.e+APE')):
        assert verdicts(rows[model], rows[other]) == [True, False]
    assert [pair for pair, intervals in zip(pairs, found) if all(low > 0 or high < 0 for low, high in intervals)] == [
        ('RoPE-2D mixed', 'RoPE-2D mixed, no LayerScale')]


def test_what_else_the_answers_say():
    text, six, five = prose(ANSWERS), top1_of('pairs', '456789'), five_seeds()
    for words, values, others in (
            ('by {} points of top-1 (95 % interval {} to {}, six seeds)', six['RoPE-2D'], six['APE']),
            ('by {} points if both have four heads instead of two ({} to {}, five seeds)',
             five['RoPE-2D, 4 heads'], five['APE, 4 heads']),
            ('is behind APE by {} points ({} to {}, six seeds)', six['APE'], six['SaPE2(K)+APE'])):
        assert words.format(*re.findall(r'[\d.]+', difference_of(values, others))) in text
    assert 'With six seeds the two agree about every pair of models' in text
    assert all(len(set(verdicts(*pair))) == 1 for pair in itertools.combinations(six.values(), 2))

    # 'No other encoding is shown to be ahead of APE, at either rate', 'No variant is shown to be ahead of APE'
    for plan, ape in (
            ('plan', 'APE'), ('half_rate', 'APE, rate .00075'), ('ablations', 'APE'),
            ('half_rate_ablations', 'APE, rate .00075')):
        top1 = top1_of(plan)
        behind = [found for found in top1.values() if sum(found) <= sum(top1[ape])]
        assert all(found in behind or not all(verdicts(found, top1[ape])) for found in top1.values())
    # 'Of the other changes only those that make the bias large are shown to matter'
    changes, bases = top1_of('ablations'), ('APE', 'SaPE2(K)', 'SaPE2(K)+APE')
    shown = {model for model in changes.keys() - set(bases) if any(
        verdicts(changes[model], changes['SaPE2(K)+APE' if '+APE' in model else 'SaPE2(K)']))}
    assert shown == {f'{name}, {change}' for name in ('K', 'K+APE') for change in ('table .5', 'squared distance')}

    sizes, shifts = kept('resolutions_cpu.csv', 'height', '32', '64'), kept('shifts_cpu.csv', 'shift', '0', '8')
    digits, white = digits_top1(), areas('white')['SaPE2(K)+APE']
    for words, *found in (
            ('SaPE2(K)+APE keeps {} % of its accuracy above chance, and APE {} %: -',
             sizes['SaPE2(K)+APE', 'own'], sizes['APE', 'own']),
            ('RoPE-2D keeps {} % of its accuracy above chance, and APE {} %, if',
             retrofit('kept', 'RoPE-2D', 64), retrofit('kept', 'APE', 64)),
            ('RoPE-2D keeps {} % if positions are rescaled', sizes['RoPE-2D', 'rescale']),
            ('it keeps {} %, less than APE', sizes['RoPE-2D', 'extrapolate']),
            ('SaPE2(K)+APE keeps {} % of its accuracy above chance, and APE {} %: +',
             shifts['SaPE2(K)+APE', 'own'], shifts['APE', 'own']),
            ('takes SaPE2(K)+APE from {} to {} %', digits['SaPE2(K)+APE'], digits['SaPE2(K)+APE, rate .0005'])):
        assert words.format(*(round(statistics.mean(values)) for values in found)) in text, words
    own, shuffled = (statistics.mean(white['trained', 'distance', mask]) for mask in ('own', 'shuffled'))
    assert f'ROC curve is {own:.3f}, and {shuffled:.3f} with the masks of other images'.replace('0.', '.') in text


def test_differences_in_the_prose_of_the_details():
    """Each is one between two models, or between what two models gain by another rate, to the last digit printed."""
    three = reduce(operator.or_, map(top1_of, ('plan', 'ablations', 'rates', 'half_rate', 'pooling')))
    groups = [(three, 2), (top1_of('pairs', '456789'), 2), (digits_top1(), 2)]
    for top1, rate in ((three, '.003'), (three, '.00075'), (groups[1][0], '.00075')):
        groups.append(({model: [a - b for a, b in zip(top1[f'{model}, rate {rate}'], top1[model])]
                        for model in ('APE', 'SaPE2(K)+APE')}, 2))
    for size in ('24', '64'):
        groups.append((kept('resolutions_cpu.csv', 'height', '32', size), 1))
    groups.append((kept('shifts_cpu.csv', 'shift', '0', '8'), 1))
    same = {}
    for row in read_csv(RESULTS / 'shifts_cpu.csv'):
        if row['shift'] == '4':
            same.setdefault(row['model'], []).append(float(row['same']))
    paired, unpaired = set(), set()
    for models, digits in (*groups, (same, 1)):
        for pair in itertools.permutations(models.values(), 2):
            paired.add(difference_of(*pair, digits))
            unpaired.add('[{:+.{d}f}, {:+.{d}f}]'.format(*unpaired_interval(*pair), d=digits))
    paired |= {difference_of(values, others, digits) for _, values, others, digits, _ in claims()[DETAILS]}
    found = re.findall(r'([+-][\d.]+ \[.*?\])|(\[[+-][\d.]+, .*?\])', without_tables(DETAILS))
    assert found and {one for one, _ in found} - {''} <= paired and {one for _, one in found} - {''} <= unpaired


def test_readme_has_the_new_seeds():
    """Top-1 of three models at both rates, and the difference from APE."""
    top1 = top1_of('pairs', '456789')
    for model in ('APE', 'SaPE2(K)+APE', 'RoPE-2D'):
        cells = [model]
        for end in ('', ', rate .00075'):
            found, ape = top1[f'{model}{end}'], top1[f'APE{end}']
            cells += [spread_of(found), '' if model == 'APE' else difference_of(found, ape)]
        assert f'| {" | ".join(cells)} |' in README.read_text()


def test_advice_is_that_of_the_results():
    """Numbers in the prose of the README and of docs/."""
    on_epyc, on_xeon = (
        {row['pos_enc']: round(100 * float(row['step_ratio']) - 100)
         for row in read_csv(RESULTS / name) if row['setting'] == '224/16'}
        for name in ('cost_epyc.csv', 'cost_xeon.csv'))
    text = '`rope2d` it takes [{} % longer](docs/cost.md) than with `ape` on an AMD EPYC, {} % longer on an Intel Xeon.'
    assert text.format(on_epyc['rope2d'], on_xeon['rope2d']) in README.read_text()
    row = r'`rope2d`, `ape` \| \+(\S+) \[\+(\S+), \+(\S+)\] \| \S+ \S+ \| 11 \| yes'
    ahead = re.search(row, (DOCS / 'choosing.md').read_text()).groups()
    assert '`rope2d` is ahead of `ape` by {} points ({} to {}) over eleven seeds'.format(*ahead) in README.read_text()
    compiled = [
        {row['backend']: float(row['step_ratio']) for row in read_csv(RESULTS / f'sape2_cpp{end}-models.csv')
         if (row['setting'], row['pos_enc']) == ('224/16', 'ape+sape2_k')}
        for end in ('', '_xeon')]
    text = 'On the Xeon a step of `ape+sape2_k` in PyTorch is {:.2f} here, and {:.2f} in the first table.'
    assert text.format(compiled[1]['torch'], 1 + on_xeon['ape+sape2_k'] / 100) in prose(DOCS / 'cost.md')
    older = [
        float(row['step_ratio']) for name in ('sape2_cpu-models', 'sape2_cpu_xeon-models')
        for row in read_csv(RESULTS / f'{name}.csv') if (row['setting'], row['pos_enc']) == ('224/16', 'ape+sape2_k')]
    in_torch = [*older, *(each['torch'] for each in compiled), 1 + on_xeon['ape+sape2_k'] / 100]
    on_cpus = {
        'in_torch': round(100 * min(in_torch) - 100),
        'torch': round(100 * max(in_torch) - 100),
        'least': round(100 * min(each['cpp'] for each in compiled) - 100),
        'most': round(100 * max(each['cpp'] for each in compiled) - 100)}
    steps = {
        (row['model'], row['backend'], row['way']): row
        for row in read_csv(RESULTS / 'h200' / 'steps.csv') if 'f892df1' in row['notes']}
    reference = float(steps['vit_small_sape2_k_ape', 'reference', 'eager']['ms'])
    assert f'A step with `reference` took {reference / 1000:.1f} s, because `cdist` is slow on GPUs.' in (
        prose(DOCS / 'cost.md'))
    again = {
        (row['model'], row['backend'], row['batch'], row['way']): row
        for row in read_csv(RESULTS / 'h200' / 'steps.csv') if 'dd1c9aa' in row['notes']}
    sape2, rope2d = (
        {way: round(100 * float(again[(*model, '128', way)]['to_ape']) - 100)
         for way in ('eager', 'compiled', 'reduce-overhead', 'graph')}
        for model in (('vit_small_sape2_k_ape', 'triton'), ('vit_small_rope2d', '')))
    text = (
        'takes {in_torch} to {torch} % longer than with `ape` on CPUs (2 threads), {least} to {most} % with '
        'compiled kernels; on an H200 {eager} % eagerly, {graph} % as a CUDA graph')
    assert text.format(**sape2, **on_cpus) in prose(README)
    text = 'On an H200 it takes [{} % longer](docs/cost.md#sape2-on-a-gpu) in eager mode, and about as long with'
    assert text.format(rope2d['eager']) in prose(README) and rope2d['compiled'] <= 0
    gains = [found['reduce-overhead'] for found in (sape2, rope2d)]
    many = again['vit_small_sape2_k_ape', 'triton', '512', 'eager']
    text = '`ape+sape2_k` takes {} % longer than `ape`, and `rope2d` {} %.'
    assert text.format(*gains) in prose(DOCS / 'cost.md')
    text = f'with 512 images `ape+sape2_k` takes {100 * float(many["to_ape"]) - 100:.0f} % longer than `ape` eagerly'
    assert text in prose(DOCS / 'cost.md')
    slower = [operator.truediv(*(
        float(again['vit_small_sape2_k_ape', backend, '128', way]['ms']) for backend in ('torch', 'triton')))
        for way in ('eager', 'compiled')]
    text = 'eager step with `torch` takes {:.1f} times as long as one with `triton`, and a compiled one {:.1f} times.'
    assert text.format(*slower) in prose(DOCS / 'cost.md')
    took = [float(row['ms']) for row in (
        again['vit_small_sape2_k_ape', 'torch', '128', 'eager'], steps['vit_small_sape2_k_ape', 'torch', 'eager'])]
    text = 'This brought the step with `torch` from {1:.0f} to {0:.0f} ms;'
    assert text.format(*took) in prose(DOCS / 'cost.md')
    (other,) = [
        row for row in read_csv(RESULTS / 'h200' / 'steps.csv')
        if 'H100' in row['notes'] and row['backend'] == 'triton']
    text = f'[{float(other["to_ape"]):.2f} times](../results/h200/steps.csv) as long as `ape`\'s eagerly'
    assert text in prose(DOCS / 'cost.md')
    calls = {(row['n'], row['backend']): row for row in read_csv(RESULTS / 'h200' / 'sape2.csv')}
    peak = {name: float(calls['4096', name]['peak_mb']) for name in ('plain', 'appendix', 'triton')}
    assert '[{:.1f} times](../results/h200/sape2.csv) that of plain attention, and {:.0f} % of that'.format(
        peak['triton'] / peak['plain'], 100 * peak['triton'] / peak['appendix']) in prose(DOCS / 'cost.md')
    errors = [float(row['error']) for row in calls.values() if row['backend'] == 'appendix' and row['error']]
    text = (
        'takes {:.1f} times as long as ours at 24x24, and in bfloat16 its output or a gradient is off by {:.0f} to '
        '{:.0f} %')
    assert text.format(
        1 / float(calls['576', 'triton']['both_vs_appendix']), 100 * min(errors), 100 * max(errors)
    ) in prose(DOCS / 'cost.md')
    waits = {row['kernel']: row for row in read_csv(RESULTS / 'h200' / 'stalls.csv')}
    own = [waits[f'attention, {what}'] for what in ('forward', 'backward, query pass', 'backward, key pass')]
    for column, low, high in (('issue_slots_busy_percent', 32, 43), ('barrier_percent', 13, 16)):
        assert [round(f([float(row[column]) for row in own])) for f in (min, max)] == [low, high]
    for text in ('started in 32 to 43 % of the cycles', 'in 13 to 16 % for the other warps'):
        assert text in prose(DOCS / 'kernels.md')
    rows = read_csv(RESULTS / 'resolutions_cpu.csv')
    top1 = [
        statistics.mean(
            float(row['top1']) for row in rows
            if (row['model'], row['rule'], row['height'], row['width']) == (*which, '64', '64'))
        for which in (('RoPE-2D', 'rescale'), ('APE', 'own'), ('RoPE-2D', 'extrapolate'))]
    text = 'at 64 px, trained at 32, with `rescale` it had {:.1f} %, `ape` {:.1f}, `rope2d` without `rescale` [{:.1f}]'
    assert text.format(*top1) in README.read_text()


def rows_of_retrofit(section):
    """The lines of tables of differences: name, px, difference, both intervals, whether it is shown."""
    for line in section.splitlines():
        cells = cells_of(line)
        if len(cells) == 9 and cells[1].endswith(' px'):
            yield cells[0], int(cells[1][:-3]), *cells[5:]


def test_what_is_left_at_other_sizes():
    """The table of results/details.md, the rules that were chosen, and biases beside RoPE-2D."""
    folder = RESULTS / 'cpu_cifar10' / 'retrofit'
    rows = [row for row in read_csv(folder / 'retrofit.csv') if row['model'] == 'not fine-tuned']
    bases = dict.fromkeys(row['base'] for row in rows)
    assert len(bases) == 8
    for base in bases:
        found = [retrofit('kept', base, size) for size in ('64', '96', '128')]
        assert {len(values) for values in found} == {5}
        cells = (spread_of(values, 1) for values in found)
        assert f'| {base} | {" | ".join(cells)} |' in DETAILS.read_text()
    section = (folder / 'retrofit.md').read_text().partition('\n## ')[0]
    found = {base: cells for base, size, *cells in rows_of_retrofit(section) if size == 96}
    for base, shown in (('FIRE', 'yes'), ('CPB', 'yes'), ('LookHere, 4 heads', 'no')):
        assert found[base][-1] == shown and f'| {" | ".join((base, *found[base]))} |' in DETAILS.read_text()
    text = 'are behind RoPE-2D at 96 px, by {} and {} points of top-1 (shown with corrected intervals)'
    assert f'FIRE and CPB, biases made for other sizes, {text}'.format(
        *(found[base][0].lstrip('-') for base in ('FIRE', 'CPB'))) in prose(ANSWERS)
    gain, *_, shown = next(cells for base, size, *cells in rows_of_retrofit(section) if (base, size) == ('FIRE', 32))
    assert shown == 'yes' and f'FIRE is behind at 32 px already, by {gain[1:]}' in prose(DETAILS)
    differences = list(rows_of_retrofit(section))
    assert f'corrected for the {len(differences)} rows' in prose(DETAILS)
    assert {cells[-1] for base, size, *cells in differences if base == 'CPB' and size in (64, 128)} == {'no'}
    for size in ('64', '96', '128'):
        assert not all(verdicts(*(retrofit('kept', f'{name}, 4 heads', size) for name in ('LookHere', 'APE'))))
    top1 = {**five_seeds(), **first_trainings()}  # of a model that was trained twice the first training
    assert all(retrofit('top1', base, 32) == pytest.approx(top1[base], abs=1e-5) for base in bases)
    assert sorted(bases & first_trainings().keys()) == ['APE, 4 heads', 'CPB', 'FIRE', 'LookHere, 4 heads', 'sincos2d']
    text = (
        'For sincos2d, CPB, FIRE, LookHere and APE with four heads this table has the first training of these seeds, '
        'on the EPYC.')
    assert text in prose(DETAILS)
    images = [next(row['num_images'] for row in rows if (row['split'], row['size']) == ('test', size))
              for size in ('64', '96', '128')]
    assert '{:,} test images at 64 px, {:,} at 96 and {:,} at 128'.format(*map(int, images)) in prose(DETAILS)
    scaled = [sum(row['rule'].endswith('+log') for row in rows if (row['split'], row['size']) == ('test', size))
              for size in ('64', '96', '128')]
    assert scaled[1] == scaled[2]
    assert 'for {} of the 40 models at 64 px and for {} at 96 and 128 px'.format(*scaled) in prose(DETAILS)
    choosing = [next(row['num_images'] for row in rows if (row['split'], row['size']) == ('held_out', size))
                for size in ('96', '128')]
    assert 'the rule was chosen on {} and {} images'.format(*choosing) in prose(DETAILS)


def test_what_is_kept_beside_ape():
    """Corrected for all models that were compared with APE, and for these at three sizes."""
    others = dict.fromkeys(row['base'] for row in read_csv(RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.csv'))
    others.pop('APE')
    assert len(others) == 7 and 'Seven models were compared with APE at each size.' in prose(DETAILS)
    higher = {}
    for base, size in itertools.product(others, (64, 96, 128)):
        found = [dict(enumerate(retrofit('kept', name, size))) for name in (base, 'APE')]
        assert corrected_cells(*found, 21)['shown'] == 'no'
        cells = corrected_cells(*found, 7).values()
        if base in ('RoPE-2D mixed', 'sincos2d', 'RoPE-2D'):
            assert f'| {base} | {size} px | {" | ".join(cells)} |' in DETAILS.read_text()
            higher[base, size] = [*cells]
        elif [*cells][0].startswith('+'):
            assert [*cells][-1] == 'no', (base, size)
    assert all(cells[0].startswith('+') for cells in higher.values())
    assert {key for key, cells in higher.items() if cells[-1] == 'yes'} == {
        ('RoPE-2D mixed', 64), ('RoPE-2D mixed', 96), ('sincos2d', 96)}
    gain, low, high = re.findall(r'[\d.]+', ' '.join(higher['RoPE-2D mixed', 64][:2]))
    text = f'only RoPE-2D mixed is shown to keep more at 64 px, by {gain} percentage points ({low} to {high}).'
    assert text in prose(ANSWERS)


def test_what_runs_of_a_seed_share():
    """Intraclass correlations by analysis of variance, after the mean of each model is subtracted."""
    def of(models):
        values = [[value - statistics.mean(found) for value in found] for found in models]
        k, n = len(values), len(values[0])
        means = [statistics.mean(of_seed) for of_seed in zip(*values, strict=True)]
        between = k * sum(mean ** 2 for mean in means) / (n - 1)
        rest = (value - mean for found in values for value, mean in zip(found, means))
        within = sum(each ** 2 for each in rest) / ((n - 1) * (k - 1))
        share = f'{(between - within) / (between + (k - 1) * within):.2f}'
        return share.replace('-0.00', '0.00').replace('0.', '.')

    found = [of(top1.values()) for top1 in (
        five_seeds(), top1_of('plan'), top1_of('pairs', '456789'), top1_of('lape', LAPE_SEEDS), repository(),
        top1_of('pooling'))]
    text = (
        'is {} in the reference table, {} among the ten models of the first table, {} and {} in the two plans with six '
        "seeds, {} among the repository's rows, and {} among the five models without a class token.")
    assert text.format(*found) in prose(DETAILS)
    assert f'their intraclass correlation is {found[0]}.' in prose(DOCS / 'choosing.md')


def test_segmentation():
    """All that is said of maps of features: means, differences from APE and whether they are shown, at both sizes."""
    text = (RESULTS / 'cpu_cifar10' / 'reference' / 'segmentation.md').read_text()
    found = {}
    for line in text.splitlines():
        cells = cells_of(line)
        if len(cells) >= 8 and cells[1].endswith(' px'):
            found[cells[0], cells[1]] = cells[2:8]
    for page in (ANSWERS, DETAILS):
        assert '## Which encoding gives the best maps of features? APE has the highest mean' in prose(page)
    models = [model for model, size in found if size == '32 px' and model != 'pixels']
    assert models[0] == 'APE'  # the best is first
    assert all(gain.startswith('-') for (model, _), (*_, gain, _, _, _) in found.items() if model in models[1:])
    for model in models:
        assert f'| {" | ".join((model, *found[model, "32 px"]))} |' in DETAILS.read_text()
    gains = [found[model, '64 px'][2] for model in models[1:]]
    text = f'At 64 px, in the order of this table, the differences are {", ".join(gains[:-1])} and {gains[-1]}.'
    assert text in prose(DETAILS)
    assert f'pixels of a patch give {found["pixels", "32 px"][1]} %' in prose(DETAILS)
    _, best, *_ = found['APE', '32 px']
    assert f'intersection over union of {best.split()[0]} % with APE.' in prose(ANSWERS)
    _, _, gain, paired, _, shown = found['RoPE-2D', '32 px']
    low, high = re.findall(r'[\d.]+', paired)
    text = f'RoPE-2D is behind by {gain[1:]} points (corrected interval {high} to {low}), which is shown.'
    assert text in prose(ANSWERS) and shown == 'yes' and float(paired.split(', ')[1].rstrip(']')) < 0
    assert 'SaPE2(K)+APE is not shown to be.' in prose(ANSWERS) and found['SaPE2(K)+APE', '32 px'][-1] == 'no'


def test_sape2_in_the_reference_table():
    """A model is shown to be behind APE if both corrected intervals are below 0."""
    table = (RESULTS / 'cpu_cifar10' / 'reference' / 'reference.md').read_text().split('\n\n')[3]
    rows = list(map(cells_of, table.splitlines()))
    gains, shown = {}, {}
    for model, _, _, _, _, _, gain, *intervals in rows[2:]:
        gains[model] = gain.lstrip('-')
        shown[model] = all(', -' in interval for interval in intervals[:2])
    assert shown['SaPE2(K)'] and not any(shown[name] for name in ('SaPE2(K)+APE', 'SaPE2(Q)+APE', 'RoPE-2D'))
    ahead = [cells[0] for cells in rows[2:] if all(interval.startswith('[+') for interval in cells[7:9])]
    for page in (ANSWERS, DETAILS):
        assert not ahead and 'rows of the reference table, no encoding is shown to be ahead.' in prose(page)
    assert 'over APE with four. The corrected intervals do not show it.' in prose(DETAILS)
    first = (dict(enumerate(first_trainings()[f'{model}, 4 heads'])) for model in ('RoPE-2D', 'APE'))
    gain, *intervals = corrected_intervals(*first, len(rows) - 3)
    text = f'on another CPU, RoPE-2D was {gain:.2f} points ahead, and the corrected intervals did show it.'
    assert text in prose(DETAILS) and min(low for low, _ in intervals) > 0
    five = five_seeds()
    rotated = difference_of(five['RoPE-2D'], five['APE'], 2).split()[0].lstrip('+')
    early = f'{statistics.mean(first_trainings()["APE, 4 heads"]) - statistics.mean(five["APE"]):.2f}'
    text = (
        f'gain APE {early} points, if both are trained on the same CPU. That is more than the lead of '
        f'RoPE-2D over APE with two heads and the same five seeds, {rotated}.')
    assert text in prose(DOCS / 'choosing.md') and float(rotated) < float(early)
    text = (
        f'SaPE2(K) alone is {gains["SaPE2(K)"]} points behind APE, which is shown with its corrected intervals. '
        f'SaPE2(K)+APE is {gains["SaPE2(K)+APE"]} points behind and SaPE2(Q)+APE {gains["SaPE2(Q)+APE"]}; '
        'neither is shown.')
    assert text in prose(DETAILS)


def test_sape2_beside_the_model_without_position():
    """No form without APE is shown to be ahead with five seeds; two are at the recipe's rate, with three."""
    five, three = five_seeds(), top1_of('ablations')
    forms = [model for model in five if model.startswith('SaPE2') and '+' not in model]
    names = ['SaPE2(K)', 'SaPE2(Q)', 'SaPE2(QK)', 'SaPE2(K) squared', 'SaPE2(Q) squared']
    assert sorted(forms) == sorted(names) and not any(all(verdicts(five[name], five['none'])) for name in forms)
    gains = [float(difference_of(five[name], five['none']).split()[0]) for name in names]
    text = (
        'The reference table has five forms of SaPE2 without APE. None is shown to be ahead of the model without '
        f'position; the one with the highest mean, SaPE2(K), is {gains[0]:+.2f} points above that model.')
    assert text in prose(ANSWERS) and gains[0] == max(gains)
    gains = [f'{name} {difference_of(five[name], five["none"])}' for name in names[1:]]
    text = f'with the same five seeds: {", ".join(gains[:-1])} and {gains[-1]}. (For the last one the other interval'
    assert text in prose(DETAILS) and verdicts(five[names[-1]], five['none']) == [False, True]
    none = top1_of('plan')['none']
    ahead = {
        model for model, found in three.items()
        if '+APE' not in model and model != 'APE' and statistics.mean(found) > statistics.mean(none)
        and all(verdicts(found, none))}
    assert ahead == {'SaPE2(Q)', 'K, negative'}
    assert "At the recipe's rate two forms are ahead of it, with seeds 1 to 3" in prose(DETAILS)
    rates = {row['model']: row['lr'] for row in read_csv(RESULTS / 'cpu_cifar10/reference/reference.csv')}
    assert rates['none'] == '0.00075'


def test_rows_of_the_reference_table_in_the_prose():
    """Which are ahead of APE, by both uncorrected intervals and by Dunnett's, and which were trained elsewhere."""
    five = five_seeds()
    order = sorted(five, key=lambda model: -statistics.mean(five[model]))
    two_heads = [model for model in order if not model.endswith('4 heads')]
    ahead = [
        model for model in two_heads if 'SaPE2' not in model and model not in ('APE', 'RoPE-2D mixed')
        and statistics.mean(five[model]) > statistics.mean(five['APE']) and all(verdicts(five[model], five['APE']))]
    assert f'They show the same for {listed(ahead)} (two heads, without SaPE2; [figures]' in prose(DETAILS)
    table = (RESULTS / 'cpu_cifar10' / 'reference' / 'reference.md').read_text().split('\n\n')[3]
    heading, _, *rows = map(cells_of, table.splitlines())
    dunnett = {cells[0]: cells[heading.index('Dunnett')] for cells in rows}
    shown = [model for model in two_heads if dunnett[model].startswith('[+')]
    alone, combined = ([model for model in shown if ('+' in model) is plus] for plus in (False, True))
    assert len(combined) == 4
    assert f'do exclude 0 for {listed(alone)}, and for four rows of two encodings.)' in prose(DETAILS)
    text = f'), {len(five)} models, {len(first_trainings())} of them twice | chosen for each model out of these two |'
    assert text in DETAILS.read_text()
    assert order[0].endswith('4 heads') and two_heads[0] == 'LaPE'
    assert 'Of the models with two heads in the [reference table]' in prose(ANSWERS)
    assert '(five seeds) LaPE has the highest mean.' in prose(ANSWERS)
    hardware = {row['model']: row['hardware'] for row in read_csv(RESULTS / 'cpu_cifar10/reference/reference.csv')}
    xeon = [model for model in order if hardware[model].startswith('Intel')]
    assert {hardware[model].split(',')[0] for model in order} == {'AMD EPYC', hardware[xeon[0]].split(',')[0]}
    assert 'Rows with one star or two were trained on an Intel Xeon, all others on an AMD EPYC.' in (
        prose(DOCS / 'choosing.md'))
    assert with_stars(1) == set(xeon)


def with_stars(least: int):
    """The models in the table of docs/choosing.md that have as many stars, or more."""
    row = r'^\| \[?([^|\]]+?)(?:\]\(\S+\))?( \*+)? \| \.\d'
    cells = re.findall(row, (DOCS / 'choosing.md').read_text(), re.MULTILINE)
    assert len(cells) == len(five_seeds())
    return {model for model, stars in cells if stars.count('*') >= least}


def test_rows_that_were_trained_twice():
    """Which they are, that both trainings had the same options, and how far their accuracy differs."""
    folder = RESULTS / 'cpu_cifar10' / 'reference'
    first, second = (
        {(run['label'], run['seed']): run for run in map(json.loads, (folder / name).read_text().splitlines())}
        for name in ('first_trainings.jsonl', 'runs.jsonl'))
    top1 = {key: [runs[key]['epochs']['eval_top1'][-1] for runs in (first, second)] for key in first}
    for key, run in first.items():
        assert run['args'] == second[key]['args'] and run['epochs'] != second[key]['epochs']
    again = {label for label, _ in first}
    assert all(len([key for key in first if key[0] == label]) == 5 for label in again)
    means = [
        [statistics.mean(values[i] for (model, _), values in top1.items() if model == label) for i in (0, 1)]
        for label in again]
    of_a_seed, of_means = (max(abs(a - b) for a, b in pairs) for pairs in (top1.values(), means))
    text = prose(DOCS / 'choosing.md')
    assert with_stars(2) == again and 'can be seen from the rows with two stars, which ' in text
    assert f'of a seed differ by up to {of_a_seed:.2f} points of top-1, and the means by up to {of_means:.2f}.' in text


def test_repeated_runs():
    """The hashes are those of the runs in the table: of all losses and accuracies, and of train.py's options."""
    folder = RESULTS / 'cpu_cifar10' / 'reference'
    runs, measures = (
        {(line.get('label', line.get('model')), str(line['seed'])): line
         for line in map(json.loads, (folder / name).read_text().splitlines())}
        for name in ('runs.jsonl', 'measures.jsonl'))
    rows = read_csv(folder / 'repeats.csv')
    assert len(rows) == 2 and 'Two runs of the [reference table]' in prose(DETAILS)
    for row in rows:
        run = runs[row['model'], row['seed']]
        options = json.dumps(run['args'], sort_keys=True).encode()
        assert row['sha256_of_args'] == hashlib.sha256(options).hexdigest()
        assert row['training_again'] == row['training'] == measures[row['model'], row['seed']]['training']
        assert row['commit'] == run['starts'][0]['commit'] != row['commit_again']


def test_interrupted_runs_are_named():
    lines = (RESULTS / 'cpu_cifar10' / 'reference' / 'runs.jsonl').read_text().splitlines()
    resumed = [(run['label'], run['seed']) for run in map(json.loads, lines) if len(run['starts']) > 1]
    text = ' and '.join(f'{label} with seed {seed}' for label, seed in sorted(resumed))
    assert f'slightly other figures](#what-to-keep): {text}.' in prose(ROOT / 'train_configs' / 'EXPERIMENTS.md')


def test_pages_know_the_reference_table():
    rows = read_csv(RESULTS / 'cpu_cifar10' / 'reference' / 'reference.csv')
    for row in rows:
        for name in row['pos_enc'].split('+'):
            page = (DOCS / 'encodings' / f'{name.removeprefix("auto_")}.md').read_text()
            assert f'| {row["model"]} | ' in page and 'It is not in [the reference table]' not in page, name


def test_grafts_at_other_sizes():
    """No difference is shown, and the means are as large as the text says."""
    sections = (RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.md').read_text().split('\n## ')[1:]
    grafts = {}
    for section in sections:
        base = section.partition('\n')[0]
        for name, size, gain, _, _, shown in rows_of_retrofit(section):
            assert shown == 'no', (base, name, size)
            if name != 'not fine-tuned':
                grafts[base, name, size] = float(gain)
    assert grafts.keys() == set(itertools.product(
        ('APE', 'sincos2d', 'RoPE-2D', 'RoPE-2D mixed'), ('fire', 'cpb', 'pape', 'sape2_k'), (32, 48, 64, 96, 128)))
    for sizes, what in (((48, 64, 96, 128), 'of that accuracy at larger sizes'), ((32,), 'at 32 px')):
        largest = max(abs(gain) for (*_, size), gain in grafts.items() if size in sizes)
        assert f'by up to {largest:.1f} % {what}' in prose(DETAILS)
    widths = {}  # of the intervals over the four bases
    for name in ('fire', 'cpb', 'sape2_k', 'pape'):
        _, low, high = mean_interval([a - b for a, b in zip(*over_bases('kept', 96, name, 'unchanged'))])
        widths[name] = high - low
    assert max(widths['fire'], widths['cpb']) < min(widths['sape2_k'], widths['pape'])
    lines = (RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.jsonl').read_text().splitlines()
    lines = [json.loads(line) for line in lines]
    moved = {}  # what a graft adds to the logits, means over seeds; of the last layer it is 0
    for base, name in {(base, name) for base, name, _ in grafts}:
        layers = [line['layers'][:-1] for line in lines if (line['base'], line['model']) == (base, name)]
        assert len(layers) == 3
        moved.setdefault(name, []).extend(
            statistics.mean(each['spread'] for each in layer) for layer in zip(*layers))
    averages = {
        (name, size): verdicts(*over_bases('kept', size, name, 'unchanged'))
        for name in widths for size in (48, 64, 96, 128)}
    assert len(averages) == 16 and 'Of all 16 such averages, of four grafts at four sizes' in prose(DETAILS)
    assert {key: found for key, found in averages.items() if any(found)} == {('pape', 128): [True, False]}
    assert verdicts(*over_bases('top1', 128, 'unchanged', 'not fine-tuned')) == [True, False]
    for names, what in ((('fire', 'cpb'), 'of a patch'), (('sape2_k',), 'SaPE2(K)'), (('pape',), 'PaPE')):
        values = [value for name in names for value in moved[name]]
        low, high = (f'{value:.2f}'.removeprefix('0') for value in (min(values), max(values)))
        assert f'{what} by {low} to {high}' in prose(DETAILS)


def test_figures_in_docs():
    sape2 = [row for row in read_csv(RESULTS / 'sape2_cpu.csv') if row['n'] == '4096']
    memory = {row['backend']: float(row['peak_mb']) for row in sape2}
    ours, plain, papers = (f'{round(memory[backend]):,}' for backend in ('torch', 'plain', 'appendix'))
    for text in (f'{ours} MB in place of {papers}, at 4,096 patches and 3 heads', f'Plain attention needs {plain} MB.'):
        assert text in prose(DOCS / 'cost.md')

    top1 = {
        (row['model'].split('/')[0], row['rule'], row['height'], row['width']): float(row['top1'])
        for row in read_csv(RESULTS / 'sweep_cpu.csv')}
    lost = [
        round(top1[f'test_vit_{name}', rule, '32', '32'] - top1[f'test_vit_{name}', rule, '64', '64'])
        for rule in ('extrapolate', 'rescale') for name in ('rope2d', 'rope2d_mixed')]
    text = 'lose {} and {} points at twice the size where angles extrapolate, {} and {} where they are rescaled'
    assert f'`rope2d` and `rope2d_mixed` {text.format(*lost)}' in prose(DOCS / 'resolutions.md')

    gains = []
    for size in (64, 96, 128):
        scaled, plain = (
            retrofit('top1', 'RoPE-2D', size, split='held_out', rule=rule) for rule in ('rescale+log', 'rescale'))
        gains.append(difference_of(scaled, plain, 1))
        assert all(verdicts(scaled, plain)) == (size > 64)
    text = (
        'it adds {} points of top-1 at 96 px and {} at 128 px, each as a single comparison. At 64 px, twice the size, '
        'a gain is not shown, {}. With `yarn` no gain is shown at any of these sizes. Corrected for the eight models')
    assert text.format(*gains[1:], gains[0]) in prose(DOCS / 'resolutions.md')
    rules = {(row['base'], row['rule']) for row in read_csv(RESULTS / 'cpu_cifar10' / 'retrofit' / 'retrofit.csv')
             if row['model'] == 'not fine-tuned' and row['split'] == 'held_out'}
    scaled_too = [(base, rule) for base, rule in rules if (base, f'{rule}+log') in rules]
    assert len({base for base, _ in scaled_too}) == 8
    for (base, rule), size in itertools.product(scaled_too, (64, 96, 128)):
        pair = [retrofit('top1', base, size, split='held_out', rule=f'{rule}{end}') for end in ('+log', '')]
        assert rule != 'yarn' or not all(verdicts(*pair))
        assert corrected_cells(*(dict(enumerate(values)) for values in pair), 8)['shown'] == 'no'

    def fine_tuned(*files):
        rows = [row for name in files for row in read_csv(RESULTS / f'finetune_graft_{name}.csv')]
        return {name: {row['seed']: float(row['top1']) for row in rows if row['graft'] == name}
                for name in ('none', 'sape2_k', 'rope2d', 'rpb')}

    top1 = fine_tuned('cpu')  # README.md, docs/grafting.md, docs/choosing.md
    assert {name: corrected_cells(values, top1['none'], 1)['shown'] for name, values in top1.items()
            if name != 'none'} == {'sape2_k': 'no', 'rope2d': 'yes', 'rpb': 'no'}
    new, both = fine_tuned('confirm'), fine_tuned('cpu', 'confirm')
    assert max(map(int, top1['none'])) == 7 and set(map(int, new['none'])) == set(range(8, 16))
    assert corrected_cells(new['rope2d'], new['none'], 1)['shown'] == 'no'
    assert corrected_cells(both['rope2d'], both['none'], 3)['shown'] == 'yes'
    gain = mean_interval([value - both['none'][seed] for seed, value in both['rope2d'].items()])
    text = 'a graft of `rope2d` gained {:.2f} points ({:.2f} to {:.2f}) over sixteen seeds.'.format(*gain)
    assert text in prose(ROOT / 'README.md')

    counts = dict(re.findall(r'\| `(\w+)` \| (\d+ \| \d+ \| \d+) \|', (RESULTS / 'naflex_grafts.md').read_text()))
    naflex, eva, plain = (counts[name].split(' | ') for name in ('naflexvit', 'eva', 'vision_transformer'))
    assert all(grafted == right for _, grafted, right in (naflex, eva, plain)) and naflex[0] == naflex[1]
    text = f'all {naflex[0]} NaFlexVits of timm, {eva[1]} of {eva[0]} of its Eva models'
    assert text in prose(DOCS / 'grafting.md')
    text = f'with `use_naflex=True`, {plain[1]} of {plain[0]} architectures of `vision_transformer.py`'
    assert text in prose(DOCS / 'grafting.md')

    probes = read_csv(RESULTS / 'probe.csv')
    predicted = [row['verdict'] for row in probes if row['verdict']]
    encodings = {row['model'] for row in probes} - {'ape+sape2_k'}
    assert set(predicted) == {'pass'} and len(encodings) >= 42
    text = f'All {len(predicted)} predictions held for {len(encodings)} encodings and `ape+sape2_k`'
    assert text in prose(DOCS / 'analysis.md')

    grafts = read_csv(RESULTS / 'grafts.csv')
    bases, refused = {row['base'] for row in grafts}, {row['base'] for row in grafts if row['refused']}
    worst = max(float(row['float32']) for row in grafts if row['float32'])
    grafted = f'Of {len(bases)} plain ViTs of timm, {len(bases - refused)} can be grafted'
    moved = f'random weights, logits move by at most {worst:.0e} in float32.'.replace('e-0', 'e-')
    text = prose(DOCS / 'grafting.md')
    assert grafted in text and moved in text
    exact = [float(row['float64']) for row in grafts if row['float64']]
    assert 'In float64 they move by at most 4e-15, or by 1e-8 if the model is converted' in text
    assert max(exact) <= 1e-8 and 3e-15 < max(error for error in exact if error < 1e-12) <= 4e-15
