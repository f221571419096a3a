"""Experiments: train models with several seeds by one recipe, through timm's train.py, and compare the results."""
from .plan import ARCHIVE, OUTPUTS, SPLITS, Plan, Run, load_plan, script_options, split_folder
from .records import Trained, trained_models
from .report import notes_of, plot_curves, rows_of, summary_table
from .results import archive_runs, read_results
from .runner import Slot, make_slots, refuse_begun_otherwise, run_all
from .trial import estimate

__all__ = [
    'ARCHIVE',
    'OUTPUTS',
    'SPLITS',
    'Plan',
    'Run',
    'Slot',
    'Trained',
    'archive_runs',
    'estimate',
    'load_plan',
    'make_slots',
    'notes_of',
    'plot_curves',
    'read_results',
    'refuse_begun_otherwise',
    'rows_of',
    'run_all',
    'script_options',
    'split_folder',
    'summary_table',
    'trained_models',
]
