"""SQL of the audit's recomputed tables, over the stored tables `s_runs`, `s_calls`, ...; a table
per concept."""

from __future__ import annotations

from ajet_sdk.trace.counted import FAILED_BY_ITSELF

_ALGORITHM = "$.ajet.trainer_common.algorithm"
_ROLLOUT = "$.ajet.rollout"
_TRAINER = "$.ajet.trainer_common"

CLIPPED = " AND ".join(
    f"config->>'{_TRAINER}.{name}' IS NOT DISTINCT FROM {value}"
    for name, value in {
        "ratio_level": "'token'",
        "ratio_base": "'sampler'",
        "clip_type": "'two_sided'",
        "clip_ratio_max": "NULL",
        "importance_weights": "'none'",
        "loss_aggregation": "'token'",
        "entropy_coef": "'0.0'",
        "use_kl_loss": "'false'",
        "algorithm.replay": "'0'",
    }.items()
)
"""Condition that the loss of a run is only the clipped policy gradient, averaged over tokens."""

TABLES = (
    # settings of a run that affect its tokens
    f"""CREATE TABLE runs AS SELECT run_id, backbone, status, epoch(started_at) AS started,
        config->>'{_ALGORITHM}.adv_estimator' AS estimator,
        try_cast(config->>'{_ALGORITHM}.normalize_std' AS BOOLEAN) AS by_deviation,
        coalesce(try_cast(config->>'{_ROLLOUT}.gamma' AS DOUBLE), 1) AS gamma,
        try_cast(config->>'{_ROLLOUT}.failure_reward' AS DOUBLE) AS failure_reward,
        try_cast(config->>'{_ROLLOUT}.max_staleness' AS INTEGER) AS max_staleness,
        coalesce(try_cast(config->>'{_ROLLOUT}.overlong_filtering' AS BOOLEAN), false)
            AND config->>'{_ALGORITHM}.adv_estimator' NOT IN ('sft', 'dpo', 'opd') AS masks_overlong,
        try_cast(config->>'{_ROLLOUT}.num_repeat' AS INTEGER) AS num_repeat,
        try_cast(config->>'{_ROLLOUT}.max_model_len' AS INTEGER) AS max_model_len,
        try_cast(config->>'{_ROLLOUT}.multi_turn.max_sample_per_task' AS INTEGER) AS max_samples,
        try_cast(config->>'{_ROLLOUT}.temperature' AS DOUBLE) AS temperature,
        config->>'{_ROLLOUT}.sampling' AS sampling,
        try_cast(config->>'{_ROLLOUT}.val_kwargs.do_sample' AS BOOLEAN) AS val_sampled,
        try_cast(config->>'$.ajet.data.max_prompt_length' AS INTEGER) AS max_prompt,
        try_cast(config->>'$.ajet.data.max_response_length' AS INTEGER) AS max_response,
        try_cast(config->>'$.ajet.trainer_common.mini_batch_num' AS INTEGER)
            * try_cast(config->>'$.ajet.trainer_common.ppo_epochs' AS INTEGER) AS updates,
        try_cast(config->>'{_TRAINER}.clip_ratio_low' AS DOUBLE) AS clip_low,
        try_cast(config->>'{_TRAINER}.clip_ratio_high' AS DOUBLE) AS clip_high,
        backbone = 'local' AND {CLIPPED} AS clipped,
        coalesce(estimator IN ('sft', 'opd'), false) AS unrewarded,
        coalesce(estimator = 'sft' OR estimator = 'dpo' AND config->>'{_ALGORITHM}.data' <> '', false) AS unsampled,
        coalesce(backbone NOT IN ('run', 'debug') AND (unrewarded
            OR estimator IN ('grpo', 'rloo', 'opo', 'reinforce_plus_plus', 'dpo')
            AND config->>'{_ALGORITHM}.use_kl_in_reward' IS DISTINCT FROM 'true'), false) AS trains,
        backbone = 'local' OR run_id IN (SELECT run_id FROM s_trained) AS stores
    FROM s_runs""",
    # policy version before and after each step with an update
    # (unlogged: it was trained, and the process that logs was killed before it logged that)
    """CREATE TABLE steps AS
    WITH logged AS (
        SELECT run_id, step, arg_max(value, "at") AS value, false AS unlogged FROM s_metrics
        WHERE name = 'train/policy_version' GROUP BY ALL),
    others AS (
        SELECT DISTINCT run_id, step, NULL::DOUBLE AS value, true AS unlogged FROM s_ledger
        JOIN (SELECT run_id, max(step) AS newest FROM logged GROUP BY run_id) USING (run_id)
        WHERE outcome = 'trained' AND step < newest AND (run_id, step) NOT IN (SELECT (run_id, step) FROM logged)),
    filled AS (
        SELECT run_id, step, unlogged, coalesce(value, 1 + coalesce(last_value(value IGNORE NULLS) OVER (
            PARTITION BY run_id ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0)) AS value
        FROM (FROM logged UNION ALL FROM others))
    SELECT run_id, step, unlogged, value AS whole, try_cast(value AS INTEGER) AS after,
        coalesce(lag(after) OVER (PARTITION BY run_id ORDER BY step), 0) AS before FROM filled""",
    f"""CREATE TABLE episodes AS
    SELECT e.*, epoch(e.started_at) AS started, epoch(e.ended_at) AS ended, s.before, s.after,
        -- of an attempt that was lost, to the infrastructure or with its client, another one counts
        r.trains AND e.split = 'train' AND (coalesce(e.client, '') <> '' AND (e.status = 'aborted' OR e.infrastructure)
            OR e.infrastructure AND e.tried_again) IS TRUE AS lost,
        r.trains AND e.split = 'train' AND NOT coalesce(e.superseded, false) AND s.step IS NOT NULL
            AND NOT lost AS learnt,
        r.failure_reward IS NOT NULL AND {FAILED_BY_ITSELF} AS given
    FROM (SELECT *, max(started_at) OVER (PARTITION BY run_id, group_id, attempt) > started_at AS tried_again
        FROM s_episodes) e JOIN runs r USING (run_id) LEFT JOIN steps s ON s.run_id = e.run_id AND s.step = e.step""",
    # calls with the number of later turns of their agents
    """CREATE TABLE calls AS
    WITH turns AS (
        SELECT *, min("index") OVER (PARTITION BY episode_id, agent, coalesce(request_id, call_id)) AS turn
        FROM s_calls),
    placed AS (
        SELECT *, dense_rank() OVER (PARTITION BY episode_id, agent, phase ORDER BY turn) AS place FROM turns)
    SELECT p.*, e.run_id, e.step, e.split, e.group_id, e.learnt, e.given, e.status, e.before, e.after,
        e.superseded, e.lost,
        e.cause, e.client,
        coalesce(p.target_tag, p.agent) AS role, len(p.output_ids) AS n,
            p.prefix_len + len(p.prompt_suffix) AS prompt,
        max(place) OVER (PARTITION BY p.episode_id, p.agent, p.phase) - place AS later
    FROM placed p JOIN episodes e USING (episode_id)""",
    # reward of a call: undiscounted if given to the call, discounted by gamma per later turn if
    # given to its agent or episode; `earned` is the undiscounted sum, which tells whether rewards
    # of a group differ
    """CREATE TABLE valued AS
    SELECT c.call_id,
        if(any_value(c.given), 1, count(w.value)) AS named,
        if(any_value(c.given), any_value(r.failure_reward),
           coalesce(sum(w.weight * w.value * if(w.call_id IS NULL, r.gamma ** c.later, 1)), 0)) AS value,
        if(any_value(c.given), any_value(r.failure_reward), coalesce(sum(w.weight * w.value), 0)) AS earned
    FROM calls c JOIN runs r USING (run_id)
    LEFT JOIN s_rewards w ON w.episode_id = c.episode_id AND w.weight <> 0
        AND (w.call_id = c.call_id OR w.call_id IS NULL AND (w.agent IS NULL OR w.agent = c.agent))
    GROUP BY c.call_id""",
    """CREATE TABLE outcomes AS
    SELECT c.*, v.value, v.earned, r.unrewarded, CASE
        WHEN c.superseded THEN 'superseded'
        WHEN c.lost THEN if(c.cause = 'Abandoned', 'abandoned', 'failed')
        WHEN c.split = 'train' AND NOT c.learnt THEN if(c.client <> '', 'abandoned', 'superseded')
        WHEN NOT c.learnt THEN 'evaluation'
        WHEN NOT c.trainable OR c.error IS NULL AND (c.output_ids IS NULL OR c.prompt_suffix IS NULL
            OR c.logprobs IS NULL AND r.estimator NOT IN ('sft', 'dpo')) THEN 'untrainable'
        WHEN c.error IS NOT NULL AND c.output_ids IS NULL AND c.cut_tokens > 0 THEN 'cancelled'
        WHEN c.error IS NOT NULL THEN 'undelivered'
        WHEN c.status <> 'succeeded' AND NOT c.given THEN 'failed'
        WHEN c.before - c.policy_version > r.max_staleness THEN 'stale'
        WHEN l.call_id IS NOT NULL THEN 'unmaskable'
        WHEN v.named = 0 AND NOT r.unrewarded THEN 'zero_advantage' END AS outcome
    FROM calls c JOIN valued v USING (call_id) JOIN runs r USING (run_id)
    LEFT JOIN (FROM s_ledger WHERE outcome = 'unmaskable') l USING (run_id, call_id)
    WHERE r.trains""",
    # mean value, mean square and length of an episode's calls: each episode counts once in the
    # baseline of its role
    """CREATE TABLE peers AS
    SELECT run_id, step, group_id, role, episode_id, avg(value) AS value, avg(value ** 2) AS square, sum(n) AS tokens,
        min(earned) AS low, max(earned) AS high
    FROM outcomes WHERE outcome IS NULL GROUP BY ALL""",
    # attempts that made no call to train count in the baseline of each role of their group
    """INSERT INTO peers
    WITH roles AS (SELECT DISTINCT run_id, step, group_id, role FROM peers),
    callless AS (
        SELECT e.*, r.failure_reward FROM episodes e JOIN runs r USING (run_id)
        WHERE e.learnt AND (e.status = 'succeeded' OR e.given) AND r.estimator IN ('grpo', 'rloo', 'opo')
            AND e.episode_id NOT IN (
                SELECT episode_id FROM outcomes WHERE outcome IS NULL OR outcome = 'zero_advantage')),
    worth AS (
        SELECT c.run_id, c.step, c.group_id, roles.role, c.episode_id, if(any_value(c.given),
            any_value(c.failure_reward), sum(w.weight * w.value)) AS value
        FROM callless c JOIN roles USING (run_id, step, group_id) LEFT JOIN s_rewards w
            ON w.episode_id = c.episode_id AND w.call_id IS NULL AND (w.agent IS NULL OR w.agent = roles.role)
        GROUP BY ALL)
    SELECT run_id, step, group_id, role, episode_id, value, value ** 2, 0, value, value FROM worth
    WHERE value IS NOT NULL""",
    """CREATE TABLE groups AS
    SELECT run_id, step, group_id, role, count(*) AS size, avg(value) AS mean,
        count(*) = 1 OR max(high) - min(low) < 1e-9 AS flat, -- one attempt is compared with none
        sqrt(greatest(avg(square) - avg(value) ** 2, 0) * size / (size - 1)) AS deviation,
        sum(value) AS total, max(value) AS best, min(value) AS worst,
        sum(value * tokens) / sum(tokens) AS mean_by_length FROM peers GROUP BY ALL""",
    """CREATE TABLE batches AS
    SELECT run_id, step, role, sum(value * n) / sum(n) AS mean, max(earned) - min(earned) < 1e-9 AS flat,
        sqrt(greatest(sum(n * value ** 2) - sum(value * n) ** 2 / sum(n), 0) / (sum(n) - 1)) AS deviation
    FROM outcomes WHERE outcome IS NULL GROUP BY ALL""",
    """CREATE TABLE advantages AS
    SELECT o.call_id, CASE r.estimator
        WHEN 'grpo' THEN if(r.by_deviation, (o.value - g.mean) / (g.deviation + 1e-6), o.value - g.mean)
        WHEN 'rloo' THEN o.value - (g.total - p.value) / (g.size - 1)
        WHEN 'opo' THEN o.value - g.mean_by_length
        WHEN 'sft' THEN 1 WHEN 'dpo' THEN if(p.value = g.best, 1, -1)
        WHEN 'reinforce_plus_plus' THEN (o.value - b.mean) / (b.deviation + 1e-6) END AS advantage,
        CASE r.estimator WHEN 'reinforce_plus_plus' THEN b.flat
        WHEN 'dpo' THEN g.flat OR p.value <> g.best AND p.value <> g.worst OR t.call_id IS NULL AND min(o.episode_id)
            OVER alike < max(o.episode_id) OVER alike -- which of several best ones is taken is not told
        ELSE g.flat AND NOT r.unrewarded END AS flat
    FROM outcomes o JOIN runs r USING (run_id) JOIN peers p USING (run_id, step, group_id, role, episode_id)
    JOIN groups g USING (run_id, step, group_id, role) JOIN batches b USING (run_id, step, role)
    LEFT JOIN (FROM s_ledger WHERE outcome = 'trained') t USING (call_id)
    WHERE o.outcome IS NULL WINDOW alike AS (PARTITION BY o.run_id, o.step, o.group_id, o.role, p.value)""",
    # calls that open a timeline: they extend no call, or one that an earlier call extends already
    """CREATE TABLE heads AS
    SELECT call_id, extends_call_id IS NULL OR row_number() OVER (
        PARTITION BY episode_id, extends_call_id ORDER BY started_at, "index") > 1 AS head
    FROM calls WHERE output_ids IS NOT NULL AND prompt_suffix IS NOT NULL""",
    # sampled tokens of a call within the limits of a training sequence; assumed correct if they
    # depend on a choice of the branch that continues the first prompt, or of the timelines drawn
    # from too many
    """CREATE TABLE lengths AS
    WITH RECURSIVE roots AS (
        SELECT call_id, prompt AS root FROM calls JOIN heads USING (call_id) WHERE head
        UNION ALL SELECT c.call_id, r.root FROM roots r JOIN calls c ON c.extends_call_id = r.call_id
            JOIN heads h ON h.call_id = c.call_id AND NOT h.head),
    drawn AS (
        SELECT episode_id, bool_or(extends_call_id IS NOT NULL AND head) AS branches, count_if(head) AS timelines
        FROM calls JOIN heads USING (call_id) WHERE trainable GROUP BY ALL)
    SELECT c.call_id, greatest(CASE
        WHEN d.branches AND r.max_response IS NOT NULL OR d.timelines > r.max_samples THEN coalesce(l.tokens, 0)
        ELSE least(c.n, r.max_model_len - c.prompt,
            least(root, coalesce(r.max_prompt, root)) + coalesce(r.max_response, r.max_model_len) - c.prompt)
        END, 0) AS kept,
        coalesce(d.branches AND r.max_response IS NOT NULL OR d.timelines > r.max_samples, false) AS given
    FROM calls c JOIN runs r USING (run_id) JOIN roots USING (call_id) LEFT JOIN drawn d USING (episode_id)
    LEFT JOIN (SELECT call_id, tokens FROM s_ledger WHERE outcome = 'trained') l USING (call_id)""",
    # calls that ended at their maximum length, or of agents whose last call did
    """CREATE TABLE overlong AS
    SELECT call_id FROM (
        SELECT c.call_id, e.cause = 'ContextOverflow' OR c.finish_reason = 'length'
            OR last_value(c.finish_reason) OVER (PARTITION BY c.episode_id, c.agent ORDER BY c.started_at, c."index"
                ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) = 'length' AS masked
        FROM calls c JOIN episodes e USING (episode_id) JOIN runs r ON r.run_id = c.run_id
        WHERE r.masks_overlong AND c.trainable AND c.phase = 'rollout' AND c.error IS NULL)
    WHERE masked""",
    """CREATE TABLE booked AS
    WITH final AS (
        SELECT o.*, a.advantage, coalesce(o.outcome, if(a.flat, 'zero_advantage', NULL),
            if(l.call_id IS NULL, NULL, 'overlong')) AS final, coalesce(k.kept, 0) AS kept
        FROM outcomes o LEFT JOIN advantages a USING (call_id) LEFT JOIN lengths k USING (call_id)
            LEFT JOIN overlong l USING (call_id) JOIN runs r USING (run_id)
        WHERE (o.trainable OR coalesce(o.outcome, '') NOT IN ('evaluation', 'superseded', 'abandoned') AND NOT o.lost)
            AND (r.status = 'finished' OR coalesce(o.superseded, false) OR o.lost
                OR coalesce(o.outcome, '') NOT IN ('superseded', 'abandoned')))
    SELECT run_id, step, episode_id, call_id, "index", final AS outcome,
        coalesce(n, 0) + coalesce(cut_tokens, 0) AS tokens FROM final WHERE final IS NOT NULL
    UNION ALL SELECT run_id, step, episode_id, call_id, "index", 'trained', kept FROM final WHERE final IS NULL
    UNION ALL SELECT run_id, step, episode_id, call_id, "index", 'truncated', n - kept FROM final WHERE final IS NULL
    UNION ALL SELECT run_id, step, episode_id, call_id, "index", 'cut', coalesce(cut_tokens, 0) FROM final
        WHERE final IS NULL""",
    "DELETE FROM booked WHERE tokens = 0",
    # rewards of episodes
    """CREATE TABLE scored AS
    SELECT e.*, coalesce(w.reward, if(e.given, r.failure_reward, NULL)) AS reward,
        coalesce(e.is_success, e.status = 'succeeded' AND w.reward >= 1, false) AS solved
    FROM episodes e JOIN runs r USING (run_id)
    LEFT JOIN (SELECT episode_id, sum(weight * value) AS reward FROM s_rewards GROUP BY ALL) w USING (episode_id)
    WHERE r.trains""",
    """CREATE TABLE followed AS
    WITH learnt AS (FROM scored WHERE learnt),
    validated AS (FROM scored WHERE split = 'val' AND NOT coalesce(superseded, false)),
    tokens AS (SELECT b.* FROM booked b JOIN calls c USING (call_id) WHERE c.learnt),
    fitted AS (
        SELECT b.run_id, b.step, c.episode_id, call_id, head, prompt + kept AS length, prompt + n AS whole,
            call_id NOT IN (SELECT extends_call_id FROM calls JOIN heads USING (call_id) JOIN booked b2 USING (call_id)
                WHERE extends_call_id IS NOT NULL AND NOT head AND b2.outcome = 'trained') AS last
        FROM booked b JOIN calls c USING (call_id) JOIN heads USING (call_id) JOIN lengths USING (call_id)
        WHERE b.outcome = 'trained'),
    scores AS (
        SELECT *, if(estimator = 'dpo', NULL, abs(trainer - sampler)) AS gap FROM (
            SELECT t.run_id, t.step, r.estimator, r.clipped, clip_low, clip_high, unnest(t.entropy) AS entropy,
                unnest(t.logprobs) AS trainer, unnest(c.logprobs) AS sampler, unnest(t.advantages) AS advantage
            FROM s_trained t JOIN calls c USING (call_id) JOIN runs r ON r.run_id = t.run_id
            WHERE r.updates = 1 AND r.trains)),
    tasks AS (
        SELECT run_id, step, task_id, count(*) AS n, count_if(solved) AS c FROM validated
        WHERE decoding = 'sampled' GROUP BY ALL),
    of_step AS (
        SELECT run_id, step, count(*) AS n, avg(reward) FILTER (status = 'succeeded' OR given) AS reward,
            stddev_pop(reward) FILTER (status = 'succeeded' OR given) AS reward_std,
            count_if(solved) / n AS solved_share, count_if(status <> 'succeeded') / n AS failed_share,
            count(DISTINCT group_id) AS groups FROM learnt GROUP BY ALL),
    of_calls AS (
        SELECT run_id, step, count(*) AS calls, sum(if(trainable, coalesce(n, 0) + coalesce(cut_tokens, 0),
            0)) AS sampled,
            sum(coalesce(n, 0) + coalesce(cut_tokens, 0)) AS every,
            -- from each update on, the tokens of a reply are younger by one
            sum(n * ("before" - policy_version)
                - coalesce(list_sum([n - place FOR place IN weight_updates]), 0)) FILTER (trainable)
                / sum(n) FILTER (trainable AND policy_version IS NOT NULL) AS stale,
                max("before" - policy_version) FILTER (trainable) AS stalest
        FROM calls WHERE learnt GROUP BY ALL)
    SELECT run_id, step, 'train/' || name AS name, value FROM (
    SELECT run_id, step, unnest(['episodes', 'reward', 'reward_std', 'solved_share', 'failed_share', 'groups']) AS name,
        unnest([n, reward, reward_std, solved_share, failed_share, groups]) AS value FROM of_step
    UNION ALL SELECT run_id, step, unnest(['calls_per_episode', 'tokens_sampled', 'staleness', 'staleness_max']),
        unnest([calls / n, sampled, stale, stalest]) FROM of_calls JOIN of_step USING (run_id, step)
    UNION ALL SELECT run_id, step, 'tokens_' || outcome, sum(tokens) FROM tokens WHERE outcome <> 'trained'
        GROUP BY ALL
    UNION ALL SELECT run_id, step, 'tokens_trained', coalesce(sum(tokens), 0)
        FROM of_step LEFT JOIN (FROM tokens WHERE outcome = 'trained') USING (run_id, step) GROUP BY ALL
    UNION ALL SELECT run_id, step, unnest(['timelines', 'tokens_in_samples', 'merge_ratio']),
        unnest([coalesce(count_if(last), 0), coalesce(sum(length) FILTER (last), 0),
            coalesce(sum(whole) / sum(length) FILTER (last), 1)])
        FROM of_step LEFT JOIN fitted USING (run_id, step) GROUP BY run_id, step
    UNION ALL SELECT run_id, step, 'splits', sum(heads - agents) FROM (
        SELECT run_id, step, episode_id, count_if(head) AS heads, count(DISTINCT (agent, phase)) AS agents
        FROM calls JOIN heads USING (call_id) WHERE learnt GROUP BY ALL) GROUP BY ALL
    UNION ALL SELECT run_id, step, unnest(['entropy', 'logprob_gap_mean', 'logprob_gap_max']),
        unnest([avg(entropy), avg(gap), max(gap)]) FROM scores WHERE NOT isnan(entropy) GROUP BY run_id, step
    UNION ALL SELECT run_id, step, 'loss', -avg(trainer) FROM scores WHERE NOT isnan(entropy) AND estimator = 'sft'
        GROUP BY run_id, step
    UNION ALL SELECT run_id, step, 'loss', -avg(least(ratio * advantage, greatest(least(ratio, 1 + clip_high),
            1 - clip_low) * advantage)) FROM (SELECT *, exp(trainer::DOUBLE - sampler) AS ratio FROM scores)
        WHERE NOT isnan(advantage) AND clipped AND estimator NOT IN ('sft', 'dpo') GROUP BY run_id, step
    UNION ALL SELECT run_id, step, 'groups_zero_variance', count_if(NOT moved) FROM (
        SELECT e.run_id, e.step, e.group_id, bool_or(b.outcome IN ('trained', 'overlong')) AS moved
        FROM learnt e LEFT JOIN booked b USING (episode_id) GROUP BY ALL) GROUP BY ALL)
    UNION ALL SELECT o.run_id, o.step, 'train/sampled_tokens_per_second', every / m.value FROM of_calls o
        JOIN runs r USING (run_id) JOIN s_metrics m ON m.run_id = o.run_id AND m.step = o.step
            AND m.name = 'time/rollout' WHERE m.value > 0 AND NOT r.unsampled
    UNION ALL SELECT o.run_id, o.step, 'train/tokens_per_second', sum(length) FILTER (last) / any_value(m.value)
        FROM fitted o JOIN s_metrics m ON m.run_id = o.run_id AND m.step = o.step AND m.name = 'train/seconds'
        WHERE m.value > 0 GROUP BY o.run_id, o.step
    UNION ALL SELECT run_id, step, 'val/' || if(decoding = 'greedy', 'greedy_reward', 'reward'), avg(reward)
        FROM validated WHERE status = 'succeeded' OR given GROUP BY run_id, step, decoding
    UNION ALL SELECT run_id, step, unnest(['val/solved_share', 'val/failed_share']),
        unnest([count_if(solved) / count(*), count_if(status <> 'succeeded') / count(*)])
        FROM validated WHERE decoding = 'sampled' GROUP BY run_id, step
    UNION ALL SELECT t.run_id, t.step, m.name, avg(1 - list_product(list_transform(range(k), lambda i:
            greatest(n - c - i, 0) / (n - i))))
        FROM tasks t JOIN (SELECT *, try_cast(substr(name, 10) AS INTEGER) AS k FROM s_metrics
            WHERE name ~ 'val/pass@[0-9]+') m
            ON m.run_id = t.run_id AND m.step = t.step WHERE k <= n GROUP BY ALL
    UNION ALL SELECT run_id, step, 'train/' || m.key, avg(try_cast(m.value AS DOUBLE))
        FROM learnt, json_each(metrics) m WHERE json_type(m.value) IN ('DOUBLE', 'UBIGINT', 'BIGINT', 'BOOLEAN')
            GROUP BY ALL
    """,
)
