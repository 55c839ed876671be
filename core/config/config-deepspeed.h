/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Files of DeepSpeed and accelerate have switches, comments that are keys, and the name of another file. zerod's own
 * files have none of these. Pure functions of the nodes of a YAML document.
 */

#include <libfyaml.h>
#include <stdbool.h>

struct config_text;

/* Are the values equal? "1.0" equals "1", and "False" equals "false". */
bool deepspeed_is_same(const char *a, const char *b);
/* Is text one of the values of the list, which ", " separates? */
bool deepspeed_is_among(const char *list, const char *text);

/* Is the value off, empty or "auto"? "enabled" may be in a section below, as in compression_training. */
bool deepspeed_is_off(struct fy_node *value);

/* Is the key a comment, such as "_comment", "//" or "#"? JSON has no other comments. */
bool deepspeed_is_comment(const char *name);

/* Is the file for DeepSpeed or accelerate? It has a key at the top that only DeepSpeed or accelerate reads, and no
 * section listen. */
bool deepspeed_is_file(struct fy_node *root);

/*
 * Finds the path at deepspeed_config.deepspeed_config_file in accelerate's text. The caller frees *out. *out is NULL if
 * the text has no such path, or is not valid. Return: 0 or -ENOMEM.
 */
int deepspeed_named_file(char **out, const struct config_text *text);
