/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Files of DeepSpeed and accelerate have switches, comments that are keys, and the name of another file. zerod's own
 * files have none of these. Pure functions of the nodes of a YAML document.
 */

#include <libfyaml.h>
#include <stdbool.h>

struct config_text;

/* "1.0" is "1", "False" is "false". */
bool deepspeed_is_same(const char *a, const char *b);
/* Is it one of the values of a list with ", " between them? */
bool deepspeed_is_among(const char *list, const char *text);

/* Does the value switch something off, or leave it to others? "enabled" may stand deeper, as in compression_training.
 */
bool deepspeed_is_off(struct fy_node *value);

/* Is the key a comment: "_comment", "//", "#"? JSON has no other. */
bool deepspeed_is_comment(const char *name);

/* Has it a key at the top that only DeepSpeed or accelerate reads, and no socket? Then zerod was not thought of. */
bool deepspeed_is_file(struct fy_node *root);

/*
 * *out: the path that a text, accelerate's, has under deepspeed_config.deepspeed_config_file, to be freed; NULL: none.
 * A text that is not valid has none. Return: 0 or -ENOMEM.
 */
int deepspeed_named_file(char **out, const struct config_text *text);
