"""Turns a configuration of axolotl, LLaMA-Factory or TRL into a recipe: one table for each tool."""
