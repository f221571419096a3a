"""Experiments: models x seeds by one recipe, through timm's own train.py, and what came out of them."""
from .plan import Plan, Run, load_plan, script_options
from .records import Trained, trained_models
from .report import difference, mean_interval, notes_of, plot_curves, rows_of, spread, summary_table, unpaired_interval
from .runner import Slot, make_slots, refuse_begun_otherwise, run_all
from .trial import estimate

__all__ = [
    'Plan',
    'Run',
    'Slot',
    'Trained',
    'difference',
    'estimate',
    'load_plan',
    'make_slots',
    'mean_interval',
    'notes_of',
    'plot_curves',
    'refuse_begun_otherwise',
    'rows_of',
    'run_all',
    'script_options',
    'spread',
    'summary_table',
    'trained_models',
    'unpaired_interval',
]
