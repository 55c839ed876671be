/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Parses YAML with libfyaml: a text becomes one document, or problems. This module adds what the library lacks: places
 * of nodes as numbers (the library only prints them), refusal of YAML that a configuration does not need, and comments
 * that begin with // or are between the marks of C, as DeepSpeed's JSON reader allows them. The library limits the
 * depth to 64 levels. The reader of the document refuses duplicate keys, because it can report all duplicates.
 */

#include "core/config/config-problem.h"

#include <libfyaml.h>
#include <stdbool.h>

struct yaml;

/*
 * Parses the text, which is not copied and must outlive *out. Return: 0, -ENOMEM, or CONFIG_E_INVALID (from config.h)
 * after adding the problem.
 */
int yaml_new(struct yaml **out, const struct config_text *text, struct config_problems *problems);
void yaml_free(struct yaml *yaml);

/* Return: the document's root, a mapping. Nodes live as long as the yaml. */
struct fy_node *yaml_root(const struct yaml *yaml);

/* Return: the place of a node. An empty value has no place: its line is 0. */
struct config_spot yaml_spot(struct yaml *yaml, struct fy_node *node);

/*
 * Return: the text of a scalar, NUL-terminated and owned by the node; NULL if the node is no scalar or holds a NUL
 * byte.
 */
const char *yaml_text(struct fy_node *node);
bool yaml_is_quoted(struct fy_node *node);

/* Return: the first value of this key of the mapping, or NULL. mapping may be NULL, or a node that is no mapping. */
struct fy_node *yaml_value_of(struct fy_node *mapping, const char *name);

/* Is the value empty, or ~ or null without quotes? node may be NULL. */
bool yaml_is_null(struct fy_node *node);
