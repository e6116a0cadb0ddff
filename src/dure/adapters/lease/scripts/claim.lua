-- Give tasks to the node they were dispatched to, oldest first, one for each lease id.
-- ARGV: prefix, node, ttl_ms, scan, lease_id...
local node, ttl = ARGV[2], ARGV[3]
local ids = redis.call('LRANGE', PENDING, -tonumber(ARGV[4]), -1)
local out, given = {}, 5
for i = #ids, 1, -1 do
  if given > #ARGV then break end
  local id = ids[i]
  local k = task(id)
  local f = redis.call('HMGET', k, 'status', 'target_node', 'lease_epoch', 'issued_epoch', 'need_vram_mb',
    'payload')
  if f[1] ~= 'PENDING' then
    redis.call('LREM', PENDING, -1, id)                 -- an entry that means nothing any more
  elseif f[2] == node then
    local issued = tonumber(f[4])
    redis.call('LREM', PENDING, -1, id)
    -- After a restart with lost writes the count may lag behind what the store has issued.
    if tonumber(f[3]) ~= issued - 1 then redis.call('HSET', k, 'lease_epoch', issued - 1) end
    local epoch = redis.call('HINCRBY', k, 'lease_epoch', 1)
    redis.call('HSET', k, 'status', 'DISPATCHED', 'node', node, 'lease_id', ARGV[given],
      'dispatched_at', NOW, 'last_heartbeat', NOW)
    redis.call('ZADD', DISPATCHED, NOW, id)
    redis.call('SET', beat_key(id), node .. ':' .. epoch, 'PX', ttl)
    if number(f[5]) > 0 then redis.call('HINCRBY', node_key(node), 'gpu_free_vram_mb', -tonumber(f[5])) end
    out[#out + 1] = id
    out[#out + 1] = tostring(epoch)
    out[#out + 1] = ARGV[given]
    out[#out + 1] = f[6]
    given = given + 1
  end
end
return out
