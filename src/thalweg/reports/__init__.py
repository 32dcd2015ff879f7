"""Reports: one HTML file that needs no network, made from records alone."""

from thalweg.reports.run import write_run_report
from thalweg.reports.runs import write_runs_report
from thalweg.reports.study import write_study_report

__all__ = ["write_run_report", "write_runs_report", "write_study_report"]
