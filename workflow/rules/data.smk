rule write_images:
    input:
        lambda w: asked.images(w.dataset),
    output:
        directory(f"{ROOT}/images/{{dataset}}"),
    log:
        f"{LOGS}/data/{{dataset}}-images.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-images.tsv"
    wildcard_constraints:
        dataset=one_of(n for n, d in experiment.datasets.items() if d.bundled),
    conda:
        ENVIRONMENT
    resources:
        kind=lambda wildcards: experiment.datasets[wildcards.dataset].kind,  # re-runs nothing
    message:
        "Writing {resources.kind} as images"
    shell:
        "maect retrieve {resources.kind} {output:q} 2> {log:q} && "
        "echo {resources.kind} > {output:q}/kind.txt"


SHARDS_CONFIG = f"{ROOT}/shards/{{dataset}}/{{split}}/config.yaml"


rule write_shards:
    input:
        config=resolved("write_shards", SHARDS_CONFIG),
        made_of=lambda w: pipeline.shards_inputs(experiment, w.dataset, w.split),
    output:
        stamp=f"{ROOT}/shards/{{dataset}}/{{split}}/done",
    log:
        f"{LOGS}/data/{{dataset}}-{{split}}.log",
    benchmark:
        f"{BENCHMARKS}/data/{{dataset}}-{{split}}.tsv"
    conda:
        ENVIRONMENT
    threads: 4
    resources:
        images=image_folder,
    params:
        config=SHARDS_CONFIG,
    message:
        "Sharding {wildcards.dataset} {wildcards.split}"
    shell:
        "maect shard {params.config:q} --threads {threads} --log {log:q}"


rule shards:
    input:
        [shards_stamp(*split) for split in experiment.splits],
    localrule: True
