-- One message a period: the node lives, its GPUs, and all its leases.
-- ARGV: prefix, node, ttl_ms, sample, fields, (name, value)*fields, (id, epoch, lease_id, started_age_ms)*
local node, ttl = ARGV[2], ARGV[3]
local nk = node_key(node)
local seen = redis.call('HMGET', nk, 'sample', 'status', 'gpus', 'bye')
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  redis.call('HSET', nk, ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('HSET', nk, 'last_seen', NOW, 'sample', ARGV[4])
if seen[1] ~= ARGV[4] then redis.call('HSET', nk, 'last_gpu_check', NOW) end
if seen[4] then redis.call('HDEL', nk, 'bye', 'bye_at') end
if not seen[1] then redis.call('SADD', P .. 'node:names', node) end

local out = { seen[2] or '' }
for i = at, #ARGV, 4 do
  local id, epoch, lease, age = ARGV[i], ARGV[i + 1], ARGV[i + 2], tonumber(ARGV[i + 3])
  local k = task(id)
  local f = redis.call('HMGET', k, 'status', 'lease_epoch', 'lease_id', 'fenced_epoch', 'cancel', 'started_at',
    'issued_epoch', 'target_node', 'acked_at')
  -- This very dispatch was claimed, and a restart of Redis has lost the claim: take it back.
  local adopted = f[1] == 'PENDING' and f[7] == epoch and f[8] == node and number(f[4]) < tonumber(epoch)
  local answer = 'LOST'
  if adopted or holds(f[2], f[3], f[4], epoch, lease) then
    local live = f[1] == 'DISPATCHED' or f[1] == 'RUNNING'
    if live then
      answer = f[5] and 'CANCEL' .. f[5] or 'OK'
    elseif (f[1] == 'NODE_WAIT' or adopted) and not f[5] then
      answer = 'RESUMED'
      unqueue(id, f[1], node)
      if adopted then
        redis.call('HSET', k, 'lease_epoch', epoch, 'lease_id', lease, 'dispatched_at', NOW)
      else
        redis.call('HSET', k, 'resumed_at', NOW)
      end
      redis.call('ZADD', DISPATCHED, NOW, id)
      changed(id)
    end
    if answer ~= 'LOST' then
      redis.call('SET', beat_key(id), node .. ':' .. epoch, 'PX', ttl)
      redis.call('HSET', k, 'last_heartbeat', NOW)
      if not f[9] then redis.call('HSET', k, 'acked_at', NOW) end
      if age >= 0 and (not f[6] or f[1] ~= 'RUNNING') then
        if not f[6] then redis.call('HSET', k, 'started_at', NOW - age) end
        redis.call('HSET', k, 'status', 'RUNNING')
        changed(id)
      elseif f[1] ~= 'RUNNING' then
        redis.call('HSET', k, 'status', 'DISPATCHED')
      end
    end
  end
  out[#out + 1] = answer
end
return out
