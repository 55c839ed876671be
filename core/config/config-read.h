/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reads a YAML text into a struct config with the table: finds the row of each pair, reports wrong and missing values,
 * and sets defaults. Internal to the configuration modules.
 */

struct config;
struct config_source;
struct config_problems;

/*
 * Reads source into config, which the caller zeroes before, and frees with config_free(), even after a failure. Return:
 * 0, CONFIG_E_INVALID (the problems say why), or -ENOMEM.
 */
int config_read(struct config *config, const struct config_source *source, struct config_problems *problems);

/*
 * Reads accelerate's file, which names the file with the settings and must have no settings itself. Sets only
 * world.size of config: to accelerate's number of processes, or to 0 if the file has none or the command line replaces
 * it.
 */
int config_read_cover(struct config *config, const struct config_source *source, struct config_problems *problems);
