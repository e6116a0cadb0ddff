-- Take away what nobody keeps alive. The node's state decides the blame, once and here.
-- ARGV: prefix, run_id, ack_ms, limit, brake (0 or 1), expected_ms (0: any), jump_ms
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local out = { run_id, tostring(NOW), '0' }
if ARGV[2] ~= run_id then return out end                -- another life of Redis: nobody armed this
if tonumber(ARGV[6]) > 0 and math.abs(NOW - tonumber(ARGV[6])) > tonumber(ARGV[7]) then return out end
local ack, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
local states = {}
local function state_of(node)
  if states[node] == nil then
    local f = redis.call('HMGET', node_key(node), 'status', 'dead')
    states[node] = { f[1] or 'SUSPECTED', f[2] == '1' } -- never looked at: not decided yet
  end
  return states[node]
end

local due, total = {}, 0
for _, id in ipairs(redis.call('ZRANGE', DISPATCHED, 0, limit - 1)) do
  local f = redis.call('HMGET', task(id), 'status', 'node', 'lease_epoch', 'acked_at', 'dispatched_at',
    'idempotent', 'seq')
  if f[1] ~= 'DISPATCHED' and f[1] ~= 'RUNNING' then
    redis.call('ZREM', DISPATCHED, id)
  else
    total = total + 1
    local state = state_of(f[2])
    local silent = redis.call('EXISTS', beat_key(id)) == 0
    local unheard = not f[4] and NOW - number(f[5]) >= ack
    local dead = f[6] == '1' and state[1] == 'OFFLINE' and state[2]
    if (silent or unheard or dead) and state[1] ~= 'SUSPECTED' then
      due[#due + 1] = { id, f[3], f[2], state[1], f[7], f[1] }
    end
  end
end
if ARGV[5] == '1' and #due >= 3 and #due * 2 >= total then
  out[3] = tostring(#due)
  due = {}
end
for _, id in ipairs(redis.call('LRANGE', PENDING, -limit, -1)) do
  local f = redis.call('HMGET', task(id), 'status', 'target_node', 'issued_epoch', 'queued_at', 'seq')
  if f[1] ~= 'PENDING' then
    redis.call('LREM', PENDING, 0, id)
  elseif NOW - number(f[4]) >= ack and state_of(f[2])[1] ~= 'SUSPECTED' then
    due[#due + 1] = { id, f[3], f[2], state_of(f[2])[1], f[5], f[1] }
  end
end
for _, d in ipairs(due) do
  local k, gone = task(d[1]), d[4] == 'OFFLINE'
  unqueue(d[1], d[6], d[3])
  redis.call('HSET', k, 'status', gone and 'NODE_WAIT' or 'FAILED', 'expired_at', NOW, 'expired_state', d[4])
  redis.call('HDEL', k, 'returned')
  if gone then
    redis.call('HSET', k, 'node_wait_since', NOW)
    redis.call('ZADD', P .. 'task:queue:nodewait:' .. d[3], number(d[5]), d[1])
  end
  -- Nobody holds what was never claimed: its end is its freeing.
  if d[6] == 'PENDING' then redis.call('HSET', k, 'freed_at', NOW) end
  changed(d[1])
  for j = 1, 4 do out[#out + 1] = d[j] end
end
return out
