"""What people run for weeks, in a small: a trainer that dies and resumes, twenty readers, two collectors, a mirror.

    python -m tests.soak.life FOLDER --seconds 7200 --seed 1

`cast` says who there is and what each does, `parts` does it, `reaper` kills, `samples` looks, `verdict` judges.
FOLDER gets `report.json` (also when the run is ended early by SIGTERM), `samples.jsonl`, `run.log` and `soak.png`.
"""
