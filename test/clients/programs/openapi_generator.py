"""The scenario with the Python client of openapi-generator."""
import os, sys, time, warnings
warnings.filterwarnings("ignore")
import payfold_client as p
from payfold_client.rest import ApiException

BASE, API_KEY, PORTAL = (os.environ[name] for name in ("BASE", "API_KEY", "PORTAL"))
RUN = f"py-{os.getpid()}-{time.time_ns()}"


def api(kind, key=API_KEY):
    client = p.ApiClient(p.Configuration(host=BASE))
    client.default_headers["Authorization"] = f"ApiKey {key}"
    return kind(client)


payments = api(p.PaymentsApi)


def create(card, cents, key):
    return payments.create_payment_with_http_info(
        p.CreatePaymentRequest(
            portal_id=PORTAL,
            amount_cents=cents,
            payment_method=p.PaymentMethodRequest(type="card", card_number=card, expiration_date="12/30", cvv="123"),
            line_items=[p.LineItemRequest(amount_cents=cents, reference_id="WATER-2041")],
        ),
        idempotency_key=key,
    )


def refused(status, code, call):
    try:
        call()
    except ApiException as error:
        assert error.status == status and (code is None or code in error.body), (error.status, error.body)
    else:
        raise AssertionError(f"expected {status}")


quote = api(p.FeesApi).quote_fee(PORTAL, 12500).data
answer, _, headers = create("4242 4242 4242 4242", 12500, RUN + "-1")
payment = answer.data
assert answer.success is True and payment.status == "succeeded" and payment.total_charged_cents == quote.total_charged_cents
assert "Idempotent-Replayed" not in headers
replay, _, headers = create("4242 4242 4242 4242", 12500, RUN + "-1")
assert replay.data.id == payment.id and headers["Idempotent-Replayed"] == "true"
second = create("4242 4242 4242 4242", 700, RUN + "-2")[0].data

seen, more = set(), {}
while True:
    page = payments.list_payments(limit=1, **more).data
    seen |= {one.id for one in page.payments}
    if page.next_cursor is None:
        break
    more = {"cursor": page.next_cursor}
assert {payment.id, second.id} <= seen

refund = payments.refund_payment(payment.id, idempotency_key=RUN + "-3", refund_request=p.RefundRequest(amount_cents=2500)).data
assert refund.remaining_refundable_amount_cents == payment.total_charged_cents - 2500
assert payments.get_payment(payment.id).data.status == "partially_refunded"
assert payments.void_payment(second.id, idempotency_key=RUN + "-4").data.status == "voided"
refused(402, "PAYMENT_DECLINED", lambda: create("4000 0000 0000 0002", 100, RUN + "-5"))
refused(400, "VALIDATION_ERROR", lambda: create("1", 100, RUN + "-6"))
refused(401, None, lambda: api(p.PaymentsApi, API_KEY + "x").get_payment(payment.id))
refused(404, "PAYMENT_NOT_FOUND", lambda: payments.get_payment("018f0000-0000-7000-8000-000000000000"))
print("scenario passed")
