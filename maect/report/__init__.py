"""Tables, figures and claims: from evaluation results to something that reads like the paper."""
