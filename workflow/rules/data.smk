rule write_images:
    output:
        directory(f"{ROOT}/images/{{dataset}}"),
    log:
        f"{LOGS}/data/{{dataset}}-images.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-images.tsv"
    wildcard_constraints:
        dataset=one_of(n for n, d in experiment.datasets.items() if d.bundled),
    localrule: True
    conda:
        ENVIRONMENT
    resources:
        kind=lambda wildcards: experiment.datasets[wildcards.dataset].kind,  # re-runs nothing
    message:
        "Writing {resources.kind} as images"
    shell:
        "maect retrieve {resources.kind} {output:q} 2> {log:q} && "
        "echo {resources.kind} > {output:q}/kind.txt"


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
    message:
        "Listing the images of {wildcards.dataset} {wildcards.split}"
    shell:
        'maect shard "$(dirname {output:q})/config.yaml" --only plan --log {log:q}'


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
    message:
        "Writing shard {wildcards.number} of {wildcards.dataset} {wildcards.split}"
    shell:
        'maect shard "$(dirname {output:q})/config.yaml" --only {wildcards.number} --log {log:q}'


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
    message:
        "Indexing the shards of {wildcards.dataset} {wildcards.split}"
    shell:
        'maect shard "$(dirname {output.index:q})/config.yaml" --only index --log {log:q}'


rule shards:
    input:
        [shard_index(*split) for split in experiment.splits],
    localrule: True
