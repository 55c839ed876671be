# SPDX-License-Identifier: Apache-2.0
"""
A load of scrapes: starts zerod-exporter for one socket and asks it RATE times per second until standard input ends.
Prints the exporter's pid when the exporter listens, and at the end the number of answers.

    scraper.py EXPORTER SOCKET RATE
"""

import http.client
import re
import select
import subprocess
import sys
import time


def scrape(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics", headers={"Accept": "application/openmetrics-text"})
    text = connection.getresponse().read().decode()
    connection.close()
    if not re.search(r"^zerod_up\{.*\} 1$", text, re.MULTILINE):
        sys.exit(f"the daemon has not answered the exporter:\n{text}")


def main(exporter, socket, rate):
    with subprocess.Popen([exporter, "--listen", "127.0.0.1:0", "--sockets", socket], stderr=subprocess.PIPE, text=True) as popen:
        try:
            port = int(re.search(r":(\d+)/metrics", popen.stderr.readline())[1])
            print(popen.pid, flush=True)
            begin, n = time.monotonic(), 0
            while True:
                pause = max(begin + n / rate - time.monotonic(), 0)
                if select.select([sys.stdin], [], [], pause)[0]:
                    break
                scrape(port)
                n += 1
            print(n)
        finally:
            popen.terminate()


main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
