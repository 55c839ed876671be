/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * One message of each kind between nodes, with every field set that the kind has. Tests compare with them, and the
 * fuzzer starts from them.
 */

#include "core/wire/node-wire.h"

enum { N_NODE_EXAMPLES = 62 };

extern const struct node_message node_examples[N_NODE_EXAMPLES];
