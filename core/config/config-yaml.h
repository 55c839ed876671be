/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * YAML by libfyaml: a text becomes one document, or problems. What the library cannot do is here too: places
 * of nodes as numbers (its public interface only prints them) and refusing what a configuration has no use
 * for, and comments that begin with // or are between the marks of C, which DeepSpeed's reader of JSON allows. Depth is
 * bounded by the library at 64 levels; duplicate keys are left for the reader of the document to refuse, because there
 * all of them can be reported.
 */

#include "core/config/config-problem.h"

#include <libfyaml.h>
#include <stdbool.h>

struct yaml;

/*
 * text: not copied, must outlive the yaml. Return: 0; CONFIG_E_INVALID (from config.h) with the problem
 * added; -ENOMEM.
 */
int yaml_new(struct yaml **out, const struct config_text *text, struct config_problems *problems);
void yaml_free(struct yaml *yaml);

/* The document's root, a mapping. Nodes live as long as the yaml. */
struct fy_node *yaml_root(const struct yaml *yaml);

/* Where a node stands. An empty value stands nowhere: line 0. */
struct config_spot yaml_spot(struct yaml *yaml, struct fy_node *node);

/* The text of a scalar, NUL-terminated, owned by the node; NULL when it is no scalar or holds a NUL byte. */
const char *yaml_text(struct fy_node *node);
bool yaml_is_quoted(struct fy_node *node);

/* The first value of a key of a mapping; NULL when there is none. mapping may be NULL, or no mapping. */
struct fy_node *yaml_value_of(struct fy_node *mapping, const char *name);

/* Nothing, ~ or null, not in quotes. node may be NULL. */
bool yaml_is_null(struct fy_node *node);
