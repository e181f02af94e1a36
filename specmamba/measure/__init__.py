"""What measuring, tuning and training share: prompts, runs, reports, and the acceptance of drafts."""
