"""Trainer ranks, an S3 server, a mirror, watchers and engines, each host a network namespace; faults that a seed draws;
and at the end the laws, checked on what was seen.

    python -m tests.chaos --seconds 600 --seed 1 --engine sglang --out chaos

    schedule    which fault hits whom, and when: drawn before the run, so that the same seed is the same run again
    world       the hosts and the processes on them: victims, nets, disks, trainers (each rank is `rank`)
    faults      begins and ends each fault of the schedule
    witness     asks every engine all the time
    record      all that was seen, as plain data: report.json
    laws        what must hold, asked of the record alone
    timeline    the picture, and the table
"""
