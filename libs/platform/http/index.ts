export { announcedBytes, bodyGuard, receiveBody, receivedBody } from './body.js';
export { addressGroup, connectionOf } from './connections.js';
export { ErrorsFilter, JSON_TYPE, sendAnswer } from './errors.filter.js';
export {
  CentsField,
  EnumField,
  type Fault,
  Field,
  laterTextFault,
  NestedField,
  TextField,
  validated,
  validatedQuery,
  validationError,
} from './fields.js';
export { parseForm, parseFormBody, RepeatedParameter } from './form.js';
export { headerLines, IDEMPOTENCY_KEY_PATTERN, idempotencyKeyOf, keyFault, MAX_KEY_LENGTH, refuseOtherContentTypes } from './headers.js';
export { type Answered, createHttpAdapter, type ServerOptions } from './server.js';
export { type JsonObject, parseStrictJson, parseStrictText } from './strict-json.js';
