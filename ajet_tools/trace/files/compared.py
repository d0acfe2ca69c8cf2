"""SQL of the audit's checks, over the tables of `recomputed`: rows whose stored values differ from
recomputed ones."""

from __future__ import annotations

from ajet_tools.trace.files.invariants import SAME_REPLY

_OF_CALL = 'ORDER BY step, episode_id, "index"'

CHECKS = {
    "copies": (
        f"""
        SELECT c.run_id, c.call_id, 'a reply of its own', 'the reply of call ' || o.call_id
        FROM calls c JOIN calls o ON {SAME_REPLY} AND c.run_id = o.run_id AND c.call_id > o.call_id
        ORDER BY c.step, c.episode_id, c."index" """
    ),
    "log-probabilities": (
        f"""
        SELECT run_id, call_id, 'finite and at most 0, ' || n || ' of them', logprobs FROM calls
        WHERE logprobs IS NOT NULL AND (len(logprobs) <> n
            OR len(list_filter(logprobs, lambda x: x IS NULL OR NOT isfinite(x) OR x > 1e-5)) > 0) {_OF_CALL}"""
    ),
    "policy versions": (
        """
        WITH aged AS (SELECT c.*, r.max_staleness, coalesce(if(c.learnt, c.before, s.after), 0) AS newest,
                if(r.backbone <> 'local', 0, if(c.learnt, newest - r.max_staleness, newest)) AS oldest
            FROM calls c JOIN runs r USING (run_id) ASOF LEFT JOIN steps s
                ON s.run_id = c.run_id AND s.step <= c.step
            WHERE r.trains AND c.trainable AND NOT coalesce(c.superseded, false) AND (c.learnt OR c.split <> 'train')
                AND (NOT r.unsampled OR c.split <> 'train'))
        SELECT aged.run_id, call_id, oldest || ' to ' || newest, policy_version FROM aged
        LEFT JOIN (FROM s_ledger WHERE outcome = 'stale') l USING (call_id)
        WHERE policy_version IS NULL AND output_ids IS NOT NULL
            OR policy_version + coalesce(len(weight_updates), 0) > newest
            OR policy_version < oldest AND l.call_id IS NULL
        ORDER BY aged.step, aged.episode_id, "index" """
    ),
    "weight updates": (
        f"""
        SELECT run_id, call_id, 'places of ' || coalesce(n, 0) || ' ids, in order', weight_updates FROM calls
        WHERE len(weight_updates) > 0 AND (policy_version IS NULL OR weight_updates[1] < 1
            OR weight_updates[-1] >= coalesce(n, 0) OR list_sort(weight_updates) <> weight_updates) {_OF_CALL}"""
    ),
    "ledger": (
        """
        SELECT coalesce(b.run_id, l.run_id), call_id, coalesce(b.tokens || ' ' || b.outcome || ' in step ' || b.step
                || ' of episode ' || b.episode_id, 'no row'), coalesce(l.tokens || ' ' || l.outcome || ' in step '
                || l.step || ' of episode ' || l.episode_id, 'no row')
        FROM (FROM booked) b FULL JOIN (FROM s_ledger WHERE tokens <> 0 AND call_id IN (SELECT call_id
            FROM outcomes o JOIN runs r
            USING (run_id) WHERE (o.trainable OR o.outcome IS DISTINCT FROM 'superseded')
                AND (r.status = 'finished' OR o.superseded OR o.lost OR o.learnt OR o.split <> 'train'))) l
            USING (call_id, outcome)
        WHERE b.tokens IS DISTINCT FROM l.tokens OR b.step IS DISTINCT FROM l.step
            OR b.run_id IS DISTINCT FROM l.run_id OR b.episode_id IS DISTINCT FROM l.episode_id
        ORDER BY coalesce(b.step, l.step), coalesce(b.episode_id, l.episode_id), "index" """
    ),
    "trained rows": (
        """
        SELECT coalesce(b.run_id, t.run_id), call_id, coalesce('step ' || b.step || ' of episode ' || b.episode_id,
            'no row'), coalesce('step ' || t.step || ' of episode ' || t.episode_id, 'no row')
        FROM (SELECT b.* FROM booked b JOIN runs r USING (run_id) WHERE b.outcome = 'trained' AND r.stores) b
        FULL JOIN (SELECT t.* FROM s_trained t JOIN runs r USING (run_id) WHERE r.trains) t USING (call_id)
        WHERE b.step IS DISTINCT FROM t.step
            OR b.run_id IS DISTINCT FROM t.run_id OR b.episode_id IS DISTINCT FROM t.episode_id
        ORDER BY coalesce(b.step, t.step), call_id"""
    ),
    "advantages": (
        f"""
        SELECT run_id, call_id, round(advantage, 6) || ' for ' || kept || ' of ' || n || ' tokens', t.advantages
        FROM calls c JOIN advantages a USING (call_id) JOIN lengths k USING (call_id)
        JOIN (SELECT call_id, advantages FROM s_trained) t USING (call_id)
        WHERE a.advantage IS NOT NULL AND (len(t.advantages) IS DISTINCT FROM n
            OR len(list_filter(t.advantages[:kept], lambda x: x IS NULL OR isnan(x)
                OR abs(x - a.advantage) > 1e-4 * (1 + abs(a.advantage)))) > 0
            OR len(list_filter(t.advantages[kept + 1:], lambda x: NOT isnan(x))) > 0) {_OF_CALL}"""
    ),
    "trainer's values": (
        f"""
        SELECT c.run_id, call_id, 'log-probabilities at most 0, entropies at least 0, where ' || kept
            || ' tokens were trained', [t.lp, t.entropy]
        FROM calls c JOIN lengths k USING (call_id) JOIN runs r USING (run_id)
        JOIN (SELECT call_id, logprobs AS lp, entropy FROM s_trained) t USING (call_id)
        WHERE r.trains AND (len(lp) IS DISTINCT FROM n OR len(entropy) IS DISTINCT FROM n
            OR len(list_filter(lp, lambda x: x IS NULL OR NOT isnan(x) AND x > 1e-5 OR isinf(x))) > 0
            OR len(list_filter(entropy, lambda x: x IS NULL OR x < -1e-5 AND NOT isnan(x) OR isinf(x))) > 0
            OR r.updates = 1 AND r.backbone = 'local' AND (len(list_filter(lp[:kept], lambda x: isnan(x))) > 0
                OR len(list_filter(entropy[:kept], lambda x: isnan(x))) > 0)) {_OF_CALL}"""
    ),
    "metrics": (
        """
        SELECT coalesce(f.run_id, m.run_id), name || ' in step ' || step, coalesce(f.value::VARCHAR, 'no row'),
            coalesce(m.value::VARCHAR, 'no row')
        FROM (SELECT f.* FROM followed f JOIN runs r USING (run_id) WHERE r.backbone = 'local'
            OR (run_id, name) IN (SELECT (run_id, name) FROM s_metrics)) f
        FULL JOIN (SELECT m.* FROM s_metrics m JOIN runs r USING (run_id)
            WHERE r.trains AND (name IN (SELECT name FROM followed) OR name ~ 'train/tokens_(superseded|untrainable|'
                'cancelled|undelivered|failed|stale|unmaskable|zero_advantage|overlong|cut|truncated)' AND value <> 0))
            m USING (run_id, step, name)
        WHERE (run_id, step) NOT IN (SELECT (run_id, step) FROM steps WHERE unlogged)
            AND f.value IS DISTINCT FROM m.value AND NOT (f.value IS NULL AND name LIKE 'train/tokens%' AND m.value = 0)
            AND coalesce(abs(f.value - m.value) > 1e-6 * (1 + abs(f.value)), true)
        UNION ALL SELECT run_id, name || ' in step ' || step, 'one finite value', string_agg(value, ', ')
        FROM s_metrics WHERE name ~ '(train|val)/.*' GROUP BY run_id, step, name HAVING count(*) > 1
            OR bool_or(value IS NULL OR NOT isfinite(value))
        UNION ALL SELECT run_id, name || ' in step ' || step, 'logged after ' || before, "at" FROM (
            SELECT *, lag("at") OVER (PARTITION BY run_id, name ORDER BY step) AS before FROM s_metrics
            WHERE name ~ '(train|val)/.*')
        WHERE before > "at"
        UNION ALL SELECT s.run_id, 'train/policy_version in step ' || s.step, 'updates: at most ' || r.updates,
            after - before
        FROM steps s JOIN runs r USING (run_id) WHERE after < before OR after IS NULL OR whole <> after
            OR r.backbone = 'local'
            AND after - before > r.updates
        ORDER BY 2"""
    ),
    "order": (
        """
        WITH seen AS (
            SELECT c.*, row_number() OVER (PARTITION BY c.episode_id ORDER BY c."index", c.call_id) - 1 AS nth,
                max(c.started_at) OVER (PARTITION BY c.episode_id
                    ORDER BY c."index" ROWS UNBOUNDED PRECEDING) AS latest,
                p."index" AS extended, p.ended_at AS extended_at, e.started_at AS began, e.ended_at AS over
            FROM calls c JOIN s_episodes e USING (episode_id)
            LEFT JOIN s_calls p ON p.call_id = c.extends_call_id AND p.episode_id = c.episode_id)
        SELECT run_id, call_id, CASE WHEN "index" IS DISTINCT FROM nth THEN 'index ' || nth
            WHEN extends_call_id IS NOT NULL AND extended IS NULL THEN 'extends a call of its episode'
            WHEN extended >= "index" THEN 'extends an earlier call' WHEN extended_at > started_at
            THEN 'starts after ' || extended_at WHEN latest > ended_at THEN 'ends after ' || latest
                || ', when an earlier call began'
            ELSE 'within ' || began || ' and ' || over END,
            'index ' || "index" || ', ' || started_at || ' to ' || ended_at || coalesce(', extends '
                || extends_call_id, '')
        FROM seen WHERE epoch(began) <> 0 AND ("index" IS DISTINCT FROM nth OR extended >= "index"
            OR extends_call_id IS NOT NULL AND extended IS NULL OR extended_at > started_at OR latest > ended_at
            OR ended_at < started_at OR started_at IS NULL OR ended_at IS NULL
            OR started_at < began - INTERVAL 1 SECOND OR ended_at > over + INTERVAL 1 SECOND AND phase = 'rollout')
        ORDER BY step, episode_id, "index" """
    ),
    "groups": (
        """
        SELECT run_id, group_id, 'one task, step and split; attempts 0 to ' || (if(learnt, n, size) - 1),
            [tasks, steps, splits] || list_transform(attempts, lambda a: a::VARCHAR) FROM (
            SELECT run_id, group_id, list(DISTINCT attempt ORDER BY attempt) AS attempts, len(attempts) AS size,
                if(any_value(r.unsampled), size, any_value(r.num_repeat)) AS n, bool_or(learnt) AS learnt,
                bool_or(learnt OR split <> 'train' AND r.status = 'finished') AS whole,
                string_agg(DISTINCT task_id) AS tasks, string_agg(DISTINCT step) AS steps,
                string_agg(DISTINCT split || coalesce(decoding, '')) AS splits,
                count(DISTINCT (task_id, task::VARCHAR, step, split, decoding)) AS kinds
                , bool_or(coalesce(client, '') <> '') AS by_clients -- whose groups may be partial
            FROM episodes e JOIN runs r USING (run_id)
            WHERE r.trains AND NOT coalesce(superseded, false) AND NOT lost GROUP BY ALL)
        WHERE kinds <> 1 OR NOT by_clients AND (whole AND attempts <> range(size) OR learnt AND size <> n)
        ORDER BY steps, group_id"""
    ),
    "episodes": (
        """
        SELECT e.run_id, episode_id, CASE WHEN e.status = 'succeeded'
            THEN 'no error, a reward' ELSE 'an error, no reward' END
            || ', its task, rewards of its agents', concat_ws(', ', e.status, cause, e.error, infrastructure,
                w.n || ' rewards', e.task_id, e.started_at, e.ended_at)
        FROM episodes e JOIN runs r USING (run_id) LEFT JOIN (
            SELECT w.episode_id, count(*) AS n, bool_or(w.value IS NULL OR w.weight IS NULL OR w.name IS NULL
                OR NOT isfinite(w.value) OR NOT isfinite(w.weight)
                OR w.call_id IS NOT NULL AND (c.call_id IS NULL OR w.agent IS NOT NULL AND w.agent <> c.agent)
                OR w.agent IS NOT NULL AND w.agent NOT IN (SELECT agent FROM s_calls)) AS odd
            FROM s_rewards w LEFT JOIN s_calls c USING (call_id, episode_id) GROUP BY ALL) w USING (episode_id)
        WHERE coalesce(odd, false) OR task->>'task_id' <> task_id OR r.trains AND task->>'task_id' IS NULL
            OR e.ended_at < e.started_at
            OR e.split = 'train' AND decoding <> 'sampled'
            OR r.trains AND (attempt IS NULL OR group_id IS NULL OR infrastructure IS NULL
            OR CASE WHEN e.status = 'succeeded' THEN cause IS NOT NULL OR e.error IS NOT NULL OR infrastructure
                OR w.n IS NULL AND (NOT r.unrewarded OR e.split <> 'train')
            ELSE cause IS NULL OR e.error IS NULL OR w.n IS NOT NULL OR e.status = 'failed'
                AND NOT contains(e.error, cause) END)
        ORDER BY step, e.started_at, episode_id"""
    ),
    "replies": (
        """
        SELECT c.run_id, call_id, concat_ws(', ', c.model, c.finish_reason, prompt || ' + '
            || (n + coalesce(cut_tokens, 0))),
            concat_ws(', ', response->>'$.model', response->>'$.choices[0].finish_reason',
                response->>'$.usage.prompt_tokens', response->>'$.usage.completion_tokens')
        FROM calls c WHERE c.output_ids IS NOT NULL AND c.prompt_suffix IS NOT NULL AND c.error IS NULL
            AND coalesce(try_cast(sampling->>'$.n' AS INTEGER), 1) = 1 AND (response->>'$.model' <> c.model
            OR response->>'$.choices[0].finish_reason' IS DISTINCT FROM c.finish_reason
            OR try_cast(response->>'$.usage.prompt_tokens' AS INTEGER) <> prompt
            OR try_cast(response->>'$.usage.completion_tokens' AS INTEGER) <> n + coalesce(cut_tokens, 0))
        ORDER BY step, episode_id, "index" """
    ),
    "requests": (
        """
        SELECT run_id, min(call_id), 'one prompt, agent and target tag', concat_ws(', ', list(DISTINCT prompt),
            list(DISTINCT agent), list(DISTINCT target_tag), list(DISTINCT started_at)) FROM calls
        WHERE request_id <> '' GROUP BY run_id, request_id
        HAVING count(DISTINCT (episode_id, prompt, agent, coalesce(target_tag, ''), started_at)) > 1
        UNION ALL SELECT run_id, min(call_id), 'one target tag of agent ' || agent, list(DISTINCT target_tag)::VARCHAR
        FROM calls GROUP BY run_id, episode_id, agent HAVING count(DISTINCT coalesce(target_tag, '')) > 1
        ORDER BY 2"""
    ),
    "sampling": (
        """
        WITH asked AS (
            SELECT c.*, r.max_model_len, try_cast(c.sampling->>'$.temperature' AS DOUBLE) AS asked,
                try_cast(c.sampling->>'$.max_tokens' AS INTEGER) AS most,
                CASE WHEN e.decoding = 'greedy' THEN 0 WHEN c.split = 'train' AND r.sampling = 'run'
                    THEN r.temperature
                WHEN c.split = 'val' AND NOT r.val_sampled THEN 1 END AS temperature
            FROM calls c JOIN runs r USING (run_id) JOIN s_episodes e USING (episode_id)
            WHERE r.trains AND c.trainable AND c.phase = 'rollout' AND c.output_ids IS NOT NULL
                AND (NOT r.unsampled OR c.split <> 'train'))
        SELECT run_id, call_id, concat_ws(', ', 'temperature ' || temperature, 'at most ' || most || ' tokens'),
            concat_ws(', ', 'temperature ' || asked, n || ' tokens', finish_reason)
        FROM asked WHERE abs(asked - temperature) > 1e-9 OR asked IS NULL OR n > most OR prompt + n > max_model_len
            OR finish_reason = 'length' AND most > n AND prompt + n < max_model_len
        ORDER BY step, episode_id, "index" """
    ),
}
