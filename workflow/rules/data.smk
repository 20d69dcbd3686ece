def shard_index(dataset, split):
    return str(experiment.shards(dataset, split) / "index.json")


def split_of(wildcards):
    return experiment.datasets[wildcards.dataset].splits[wildcards.split]


def images_of(wildcards):
    """The image folder if a rule of this workflow makes it; a user's folder is not watched."""
    if experiment.datasets[wildcards.dataset].kind == "digits":
        return f"{ROOT}/images/{wildcards.dataset}"
    return []


def image_folder(wildcards):
    """Passed as a resource, not in `params`: images that moved re-run nothing."""
    return images_at(wildcards.dataset, wildcards.split)


@cache  # a split may have a thousand shards
def images_at(dataset, split):
    warn(check.missing_images(experiment, [(dataset, split)]))
    return str(experiment.images(dataset, split))


def parts_of(wildcards):
    """What an index is made of: plan and tars; for a view the whole's index, and its classes."""
    split = split_of(wildcards)
    if not split.source.sharded:
        return [shard_index(wildcards.dataset, split.of), *split.files()]
    folder = experiment.shards(wildcards.dataset, wildcards.split)
    tars = [shard_name(wildcards.split, number) for number in range(split.shards)]
    return [f"{folder}/{name}" for name in ("plan.json", *tars)]


rule write_digits:
    output:
        directory(f"{ROOT}/images/{{dataset}}"),
    log:
        f"{LOGS}/data/{{dataset}}-images.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-images.tsv"
    wildcard_constraints:
        dataset=one_of(n for n, d in experiment.datasets.items() if d.kind == "digits"),
    localrule: True
    conda:
        ENVIRONMENT
    message:
        "Writing scikit-learn's digits as images"
    shell:
        "maect retrieve digits {output:q} 2> {log:q}"


rule plan_shards:
    input:
        images_of,
    output:
        f"{ROOT}/shards/{{dataset}}/{{split}}/plan.json",
    log:
        f"{LOGS}/data/{{dataset}}-{{split}}-plan.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-{{split}}-plan.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        images=image_folder,
    params:
        source=lambda w: split_of(w).arguments(),
    message:
        "Listing the images of {wildcards.dataset} {wildcards.split}"
    shell:
        "maect shard {resources.images:q} $(dirname {output:q}) {params.source:q}"
        " --only plan 2> {log:q}"


rule write_shard:
    input:
        rules.plan_shards.output,
    output:
        f"{ROOT}/shards/{{dataset}}/{{split}}/{{split}}-{{number}}.tar",
    log:
        f"{LOGS}/data/{{dataset}}-{{split}}-{{number}}.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-{{split}}-{{number}}.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        images=image_folder,
    params:
        source=lambda w: split_of(w).arguments(),
    message:
        "Writing shard {wildcards.number} of {wildcards.dataset} {wildcards.split}"
    shell:
        "maect shard {resources.images:q} $(dirname {output:q}) {params.source:q}"
        " --only {wildcards.number} 2> {log:q}"


rule index_shards:
    input:
        parts_of,
    output:
        index=f"{ROOT}/shards/{{dataset}}/{{split}}/index.json",
        rows=f"{ROOT}/shards/{{dataset}}/{{split}}/index.npy",
    log:
        f"{LOGS}/data/{{dataset}}-{{split}}-index.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-{{split}}-index.tsv"
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        images=image_folder,
    params:
        source=lambda w: split_of(w).arguments(),
    message:
        "Indexing the shards of {wildcards.dataset} {wildcards.split}"
    shell:
        "maect shard {resources.images:q} $(dirname {output.index:q}) {params.source:q}"
        " --only index 2> {log:q}"


rule shards:
    input:
        [shard_index(*split) for split in experiment.splits],
    localrule: True
