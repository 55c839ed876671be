/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/*
 * Reading a YAML text into a struct config by the table: which rows apply, where each pair goes, what is
 * wrong with it, what is missing, and the defaults. Internal to the configuration modules.
 */

struct config;
struct config_source;
struct config_problems;

/*
 * config: zeroed by the caller, to be freed by it with config_free in any case.
 * Return: 0, CONFIG_E_INVALID (the problems say why), or -ENOMEM.
 */
int config_read(struct config *config, const struct config_source *source, struct config_problems *problems);

/*
 * Reads accelerate's file, which names the file that has the settings, and must have none itself. Of
 * config only world.size is set: accelerate's number of processes, 0 if the file has none or it is overruled.
 */
int config_read_cover(struct config *config, const struct config_source *source, struct config_problems *problems);
