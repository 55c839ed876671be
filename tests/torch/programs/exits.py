# SPDX-License-Identifier: Apache-2.0
"""
How a program with zerod.Optimizer ends, for test_bad_input.py: exits.py HOW. Each trains up to the step that it names.

    done         comes to its end without close()
    backward     the same, with a backward that no step followed
    raises       is ended by an exception of its own
    fails        exits with status 3, and Python knows of no exception
    exits        exits with status 0 from the middle of it, and reads state in an exit handler
    waits        waits in step() for another rank, until somebody interrupts it
    writes       writes to a published weight, and is done
    trains-on    the same, and trains on
    early        closes after two steps
    successor    trains to the end and closes
"""

import atexit
import signal
import sys

kept = []
atexit.register(lambda: [print("saved", opt.full_state_dict()["state"][0]["step"]) for opt in kept])  # after zerod's own

import torch  # noqa: E402
from torch import nn  # noqa: E402

import zerod  # noqa: E402

N_STEPS = 4


def careless(weight):
    weight.data[0] = 1.0


def train(model, opt, until):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    while opt.epoch < until:
        model(x).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    return model(x).pow(2).mean()


def main(how):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6))
    opt = zerod.Optimizer(model)
    loss = train(model, opt, N_STEPS if how == "successor" else 2)
    if how == "backward":
        loss.backward()
    elif how == "raises":
        loss.backward()
        raise ArithmeticError("out of luck")
    elif how == "fails":
        loss.backward()
        sys.exit(3)
    elif how == "exits":
        kept.append(opt)
        sys.exit(0)
    elif how == "waits":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # inherited as ignored in the background of a shell
        loss.backward()
        print("waits", flush=True)
        opt.step()
    elif how in ("writes", "trains-on"):
        careless(model[2].weight)
        if how == "trains-on":
            train(model, opt, N_STEPS)
    elif how != "done":
        opt.close()
    print("the end", flush=True)


main(sys.argv[1])
