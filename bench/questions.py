# SPDX-License-Identifier: Apache-2.0
"""The cost of zerodctl's questions, and of scrapes, for the trainers."""

import sys
import time

from harness import MI, ROOT, Process, ZerodJob, median, n_cores, program, row, say

LOADS = {
    "1 connection, report, never read": ("--command", "report", "--never-read"),
    "60 connections, 8 status in flight each": ("--connections", "60", "--in-flight", "8"),
    "4 connections, report": ("--connections", "4", "--command", "report"),
    "16 connections, status": ("--connections", "16"),
}
MOST = 1.1  # limit, in times of the undisturbed step
SCRAPES_PER_S = 10  # Prometheus makes one scrape in 15 seconds
MOST_SCRAPED = 1.01
PARAMS = 200


def asking(job, load):
    return [program("bench-asker"), "--socket", job.daemon.socket, *load]


def scraping(job, rate=SCRAPES_PER_S):
    return [sys.executable, str(ROOT / "bench/scraper.py"), program("zerod-exporter"), job.daemon.socket, str(rate)]


def block(job, n_steps, load=None):
    """Return: the milliseconds of each step, and the answers per second. load: the command line of the load."""
    asker = Process(load) if load else None
    try:
        if asker:
            asker.receive()
            job.step()
        begin = time.monotonic()
        steps = [job.step()["total"] for _ in range(n_steps)]
        seconds = time.monotonic() - begin
        return steps, int(asker.finish()) / seconds if asker else 0
    finally:
        if asker:
            asker.stop()


def processor_ms(*pids):
    """Return: the processor time of all threads of the processes, also ended threads. ~pid << 3 | 2 is the clock of a
    process."""
    return sum(1e3 * time.clock_gettime(~pid << 3 | 2) for pid in pids)


def scrape_ms(job, seconds):
    """Return: the daemon's and the exporter's processor time for one scrape, while the ranks wait, without their idle
    load."""
    daemon = job.daemon_pid()
    begin = processor_ms(daemon)
    time.sleep(seconds)
    idle = processor_ms(daemon) - begin
    scraper = Process(scraping(job, 10 * SCRAPES_PER_S))
    try:
        exporter = int(scraper.receive())
        begin = processor_ms(daemon, exporter)
        time.sleep(seconds)
        spent = processor_ms(daemon, exporter) - begin
        return (spent - idle) / int(scraper.finish())
    finally:
        scraper.stop()


def questions(quick):
    """A small step while clients ask continuously or Prometheus scrapes, compared with the undisturbed step."""
    rows, table = [], []
    job = ZerodJob(2, 2, elems=MI, params=PARAMS)
    loads = [(name, asking(job, load), MOST, 20) for name, load in LOADS.items()]
    # These loads run for more steps, because each block must contain some scrapes.
    loads.append((f"zerod-exporter, {SCRAPES_PER_S} scrapes a second", scraping(job), MOST_SCRAPED, 100))
    try:
        block(job, 20)
        for name, load, most, n_steps in loads:
            quiet, loaded, rates = [], [], []
            for _ in range(6 if quick else 20):
                quiet += block(job, n_steps)[0]
                steps, rate = block(job, n_steps, load)
                loaded += steps
                rates.append(rate)
            say(f"  {name}: {median(loaded):.2f} ms, {median(quiet):.2f} undisturbed")
            rows.append(row(f"questions: {name}", median(loaded), median(quiet), "undisturbed", "ms", 1 / most))
            table.append([name, *(f"{v:.2f}" for v in (median(quiet), median(loaded))),
                          f"{median(loaded) / median(quiet):.3f}", f"{median(rates):.0f}"])
        scrapes_ms = SCRAPES_PER_S * scrape_ms(job, 2 if quick else 10)
        rows.append(row(f"questions: processor time of {SCRAPES_PER_S} scrapes, in a second", scrapes_ms,
                        1e3 * (MOST_SCRAPED - 1) * n_cores(), "1 % of all cores", "ms", 1.0))
    finally:
        job.stop()
    head = ["load", "step, undisturbed, ms", "step, loaded, ms", "loaded / undisturbed", "answers in a second"]
    return rows, {"each load": [head, *table]}
