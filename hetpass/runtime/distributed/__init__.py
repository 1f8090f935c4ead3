"""A step over several processes: one per host of each group, each with its own part.

driver.py     the user's process: gives batches, holds names of arrays that live elsewhere
crew.py       starts the workers and speaks with them
worker.py     a process's part: compiles it, runs it, keeps its arrays
lanes.py      one order of dispatch, seen by one process, lane by lane
arrivals.py   what comes from other processes, checked and assembled
"""
