"""A step over several processes: one per host of each group, each with its own part.

driver.py           the user's process: gives batches, holds names of arrays that live elsewhere
workers.py          what a user says about the processes
crew.py             how the driver speaks with the workers; ray_crew.py: processes, by Ray
worker_process.py   the process of a worker
worker.py           a process's part: compiles it, runs it, keeps its arrays
lanes.py            one order of dispatch, seen by one process, lane by lane
arrivals.py         what comes from other processes, checked and assembled
"""
